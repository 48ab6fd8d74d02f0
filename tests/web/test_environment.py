"""Every variable that the platform reads is documented, and the other way round."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ = re.compile(r'(?:text|flag|number|words)\("([A-Z_]+)"')


def test_every_variable_is_documented():
    sources = [ROOT / "platform/oppo_platform" / name for name in ("settings.py", "environment.py")]
    read = {name for source in sources for name in READ.findall(source.read_text())}
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE))
    assert read == documented
