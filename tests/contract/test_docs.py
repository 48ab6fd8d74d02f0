"""The documentation matches the code: settings, metrics, events, states, phases and links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from oppo_contract.events import Counter, IdleCause, Phase

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
# Named here because they are only told when there is something to tell: a bubble's cause, a step after a checkpoint, a GPU.
ONLY_SOMETIMES = re.compile(
    r"idle_s/|timing_s/save_checkpoint$|oppo/behaviour_prox_kl/|oppo/length_bias$|critic/score_part/"
    r"|oppo/reward_cached_share$|oppo/wasted_tokens$|oppo/uniform_groups$|oppo/replaced_groups$|oppo/queued$|actor/ptx_loss$"
    r"|^nvml/|^gpm/|^perf/mfu/|^perf/hand_over_gb$|^perf/max_memory_"
)
# Named, but not in a checkout: what stands in a wheel only, and what must never be there.
ELSEWHERE = {"oppo_platform/_templates", "platform/__init__.py"}
# As a whole string: "OPPO_HOME" is read, "OPPO_" is a prefix.
VARIABLE = re.compile(r"""["'](OPPO_[A-Z0-9_]*[A-Z0-9]|DATABASE_URL|REDIS_URL)["']""")
# Pages that name code and the tests that hold it to what they say.
LAWS = ("ARCHITECTURE.md", "docs/pictures.md", "docs/exactness.md", "docs/delivery.md")
TINY = {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "context": 64, "vocab": 64}}
SPEC = {
    "name": "documented",
    "steps": 3,
    "models": {"actor": TINY, "reward": {"model": TINY}},
    "data": {"prompts": "prompts.jsonl"},
    "ppo": {"batch_size": 4},
    "rollout": {"max_new_tokens": 24, "max_prompt_tokens": 16},
    "overlap": {"overcommit": {"initial": 2, "max": 4}},
    "evaluation": {"prompts": "prompts.jsonl", "every_steps": 2, "count": 3},
}


def text_of(page: str) -> str:
    """A documentation page."""
    return (ROOT / page).read_text(encoding="utf-8")


def expanded(name: str) -> list[str]:
    """`a/{x,y}` as `a/x` and `a/y`; `{device}` and `{cause}` stay."""
    parts = re.split(r"\{([a-z0-9_]+(?:,[a-z0-9_]+)+)\}", name)
    return ["".join(choice) for choice in product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts)))]


def documented_metrics() -> set[str]:
    """Names in the first column of the tables of docs/metrics.md, before its lists of phases and causes."""
    tables = text_of("docs/metrics.md").partition("### Phases")[0]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    return {name for cell in cells for quoted in re.findall(r"`([^`]+)`", cell) for name in expanded(quoted)}


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names that a real run of three steps emits, its devices and idle causes replaced by their placeholders."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)), encoding="utf-8")
    (folder / "spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    command = [sys.executable, "-m", "oppo_core", "--spec", "spec.json", "--out", "out", "--events", "events.jsonl"]
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=120)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {name for event in events if event["kind"] == "step" for name in event["metrics"]}
    return {re.sub(r"^idle_s/.*/[a-z]+$", "idle_s/{device}/{cause}", re.sub(r"cpu:\d+", "{device}", name)) for name in names}


def test_every_metric_is_documented(emitted: set[str]) -> None:
    assert sorted(emitted - documented_metrics()) == []


def test_no_metric_is_documented_that_does_not_exist(emitted: set[str]) -> None:
    assert sorted(name for name in documented_metrics() - emitted if not ONLY_SOMETIMES.search(name)) == []


@pytest.mark.parametrize("word", [*get_args(Phase), *get_args(IdleCause), *get_args(Counter)])
def test_every_phase_idle_cause_and_counter_is_explained(word: str) -> None:
    assert f"`{word}`" in text_of("docs/metrics.md").partition("### Phases")[2]


def test_every_environment_variable_is_explained() -> None:
    sources = [path for folder in ("platform", "worker", "oppo_core") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    explained = set(
        re.findall(r"`([A-Z_]+)`", "".join(text_of(f"docs/{name}.md") for name in ("operations", "environment", "client")))
    )
    assert sorted(read - explained) == []


def named_paths(page: str) -> set[tuple[str, str]]:
    """(path, name within it or "") of everything that a page quotes as `folder/file` or `folder/file.py::name`."""
    quoted = re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+\.\w+)?)(?:::(\w+)(?:\.\w+)*)?`", text_of(page))
    return {(path, name) for path, name in quoted if path not in ELSEWHERE}


@pytest.mark.parametrize(("path", "name"), sorted(set.union(*map(named_paths, LAWS))))
def test_code_named_in_the_documentation_exists(path: str, name: str) -> None:
    found = [
        folder / path for folder in (ROOT, ROOT / "platform", ROOT / "platform" / "oppo_platform") if (folder / path).exists()
    ]
    assert found, f"there is no {path}"
    defined = rf"^\s*(?:async )?(?:def|class) {name}\b"
    assert not name or re.search(defined, found[0].read_text(encoding="utf-8"), re.MULTILINE), f"{path} defines no {name}"


def test_the_folders_of_the_architecture_page_hold_what_it_says() -> None:
    block = text_of("ARCHITECTURE.md").rpartition("## Folders")[2].split("```")[1]
    for line in filter(None, block.splitlines()):
        folders, _, content = line.partition("  ")
        assert [folder for folder in folders.split() if not (ROOT / folder).is_dir()] == []
        names = re.findall(r"\b\w+(?:\.py\b|/)", content)
        assert [name for name in names if not any((ROOT / folder / name).exists() for folder in folders.split())] == []


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, section = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        headings = (
            re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            if other.suffix == ".md" and other.exists()
            else []
        )
        if not other.exists() or (section and section not in map(anchor, headings)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")))
    assert named <= targets
