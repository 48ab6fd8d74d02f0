"""Every variable that the platform reads is documented, and the other way round."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NUMBER = re.compile(r'number\("([A-Z_]+)", ([\d* ]+)\)')
READ = re.compile(r'(?:text|flag|number|words)\("([A-Z_]+)"')


def test_every_variable_is_documented():
    sources = [ROOT / "platform/oppo_platform" / name for name in ("settings.py", "environment.py")]
    read = {name for source in sources for name in READ.findall(source.read_text())}
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE))
    assert read == documented


def test_every_number_s_default_is_the_documented_one():
    page = (ROOT / "docs/environment.md").read_text()
    told = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d+)", page, re.MULTILINE))
    text = "".join((ROOT / "platform/oppo_platform" / name).read_text() for name in ("settings.py", "environment.py"))
    defaults = {name: eval(value) for name, value in NUMBER.findall(text)}  # products of numbers
    assert len(defaults) > 20
    assert {name: int(told.get(name, -1)) for name in defaults} == defaults
