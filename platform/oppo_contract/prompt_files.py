"""Which files hold prompts: their formats by suffix, and the files of a folder. Nothing is read."""

from __future__ import annotations

import re
from pathlib import Path

JSON_LINES, PARQUET, ARROW = "JSON Lines", "Parquet", "Arrow"
# A file with another suffix is read as JSON Lines.
FORMATS = {".jsonl": JSON_LINES, ".parquet": PARQUET, ".arrow": ARROW, ".feather": ARROW, ".ipc": ARROW}
SHARD = re.compile(r"-\d+-of-\d+\.[a-z]+$")


class PromptFilesError(ValueError):
    """A folder or a list that cannot be one set of prompts. The message has the reason and a remedy."""


def format_of(file: Path) -> str:
    """JSON Lines, Parquet or Arrow, by the suffix."""
    return FORMATS.get(file.suffix, JSON_LINES)


def split_names(files: list[str]) -> set[str]:
    """Names of the sets whose parts these files are, as `train` of `train-00001-of-00002.parquet`; other files have none."""
    return {SHARD.sub("", name) for name in files if SHARD.search(name)}


def expand(paths: list[Path]) -> list[Path]:
    """The files of a set of prompts, in order: files as given, folders by their files in order of name.

    Raises:
        PromptFilesError: a folder holds no such file or the parts of several sets (as `train` and `test`), a file is given twice,
            or the files have several formats.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.iterdir() if file.suffix in FORMATS) if path.is_dir() else [path]
        if len(splits := sorted(split_names([file.name for file in inside]))) > 1:
            raise PromptFilesError(f"{path} holds the files of several sets, {', '.join(splits)}; list the files of one")
        if not inside:
            raise PromptFilesError(f"{path} holds no prompts file ({', '.join(FORMATS)})")
        files += inside
    if twice := sorted({str(file) for file in files if files.count(file) > 1}):
        raise PromptFilesError(f"{twice[0]} is given twice")
    first: dict[str, str] = {}
    for file in files:
        first.setdefault(format_of(file), file.name)
    if len(first) > 1:
        listed = " and ".join(f"{kind} ({name})" for kind, name in first.items())
        raise PromptFilesError(f"the prompts are files of several formats, {listed}; give files of one format")
    return files
