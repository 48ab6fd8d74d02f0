"""What lies below the worker's roots: model folders and sets of prompts, so that submit can check against it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import structlog

from oppo_contract.wire import MAX_ARCHITECTURE, MAX_TOKENS, CatalogueEntry

MAX_DEPTH = 4
MAX_ENTRIES = 2000
SCAN_EVERY_S = 10.0
SCAN_SHARE = 0.01  # of the time, at most
FIRST_SCAN_WITHIN_S = 0.5  # is waited for, so that the first heartbeat can tell
LONG_SCAN_S = 60.0  # is worth a warning
TINY = "oppo_tiny"
Task = Literal["causal_lm", "sequence_classification", ""]

log = structlog.get_logger("worker.catalogue")


@dataclass(slots=True)
class Catalogue:
    """Scans the roots; facts that need reading whole files are kept by (path, size, time of change)."""

    roots: list[Path]
    entries: list[CatalogueEntry] = field(default_factory=list)
    _facts: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _left_out: dict[Path, str] = field(default_factory=dict)
    _next_scan: float = 0.0

    def due(self, now_s: float) -> bool:
        """Whether it is time for the next scan."""
        return now_s >= self._next_scan

    def refresh(self, now_s: float | None = None) -> bool:
        """Scan when it is due; returns whether the entries changed."""
        now_s = time.monotonic() if now_s is None else now_s
        if not self.due(now_s):
            return False
        started = time.monotonic()
        try:
            found = self._scan()
        finally:
            took = time.monotonic() - started
            self._next_scan = now_s + max(SCAN_EVERY_S, took / SCAN_SHARE)
        changed = found != self.entries
        self.entries = found
        return changed

    def _scan(self) -> list[CatalogueEntry]:
        found: dict[str, CatalogueEntry] = {}
        for entry in itertools.chain.from_iterable(map(self._below, self.roots)):
            found.setdefault(entry.id, entry)
            if len(found) >= MAX_ENTRIES:
                break
        return list(found.values())

    def _below(self, root: Path) -> Iterator[CatalogueEntry]:
        for folder, subfolders, files in os.walk(root, followlinks=True):
            here = Path(folder)
            depth = len(here.relative_to(root).parts)
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(".")) if depth < MAX_DEPTH else []
            if "config.json" in files and here != root:
                subfolders[:] = []  # what lies in a model folder belongs to the model
                yield from self._told(self._model, here, root)
                continue
            for name in sorted(name for name in files if name.endswith(".jsonl")):
                yield from self._told(self._prompts, here / name, root)

    def _told(self, describe: Callable[[Path, str], CatalogueEntry | None], path: Path, root: Path) -> list[CatalogueEntry]:
        """The entry at a path. What cannot be read, or told to the platform, is left out alone, and the log says so once."""
        try:
            entry = describe(path, path.relative_to(root).as_posix())
        except (OSError, ValueError, RecursionError) as error:
            said = _sayable(f"{type(error).__name__}: {error}")[:500]
            if self._left_out.get(path) != said:
                log.warning("left_out_of_catalogue", path=_sayable(str(path)), detail=said)
            self._left_out[path] = said
            return []
        self._left_out.pop(path, None)
        return [] if entry is None else [entry]

    def _model(self, folder: Path, name: str) -> CatalogueEntry | None:
        _status_of_file(folder / "config.json")
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except ValueError:  # being written, or something else's config.json
            return None
        if not isinstance(config, dict):
            return None
        sizes = [file.stat().st_size for file in folder.iterdir() if file.suffix == ".safetensors"]
        tokenizer = folder / "tokenizer.json"
        digest = self._fact(tokenizer, _sha256) if tokenizer.is_file() else ""
        architecture, task, context, vocab = _described(config)
        return CatalogueEntry(
            id=name, kind="model", bytes=sum(sizes), architecture=architecture, task=task, tokenizer_digest=digest,
            context=context, vocab=vocab,
        )  # fmt: skip

    def _prompts(self, file: Path, name: str) -> CatalogueEntry:
        size = _status_of_file(file).st_size
        return CatalogueEntry(id=name, kind="prompts", bytes=size, rows=int(self._fact(file, _row_count)))

    def _fact(self, file: Path, read: Any) -> str:
        status = file.stat()
        key = (f"{read.__name__} {file}", status.st_size, status.st_mtime_ns)
        if key not in self._facts:
            self._facts[key] = str(read(file))
        return self._facts[key]


class CatalogueWatch:
    """Scans in a thread of its own: a root that hangs, or a long file whose rows are counted, holds up no heartbeat."""

    def __init__(self, roots: list[Path]) -> None:
        self._catalogue = Catalogue(roots)
        self._seen: list[CatalogueEntry] | None = None
        self._told: list[CatalogueEntry] | None = None
        self._scan: threading.Thread | None = None
        self._warn_at = float("inf")

    def news(self, *, wanted: bool = False) -> list[CatalogueEntry] | None:
        """What a heartbeat should tell: what was seen last, if that is new or `wanted`; None before the first scan has ended."""
        now = time.monotonic()
        if self._scan is not None and self._scan.is_alive():
            self._warn_of_a_long_one(now)
        elif self._catalogue.due(now):
            self._begin(now)
        return self._seen if wanted or self._seen is not self._told else None

    def was_told(self, entries: list[CatalogueEntry]) -> None:
        """The platform has got them."""
        self._told = entries

    def _begin(self, now: float) -> None:
        first, scan = self._scan is None, threading.Thread(target=self._look, name="catalogue", daemon=True)
        try:
            scan.start()
        except RuntimeError as error:  # no more threads for the moment
            log.warning("catalogue_not_scanned", detail=str(error))
            return
        self._scan, self._warn_at = scan, now + LONG_SCAN_S
        if first:
            scan.join(FIRST_SCAN_WITHIN_S)

    def _look(self) -> None:
        changed = self._catalogue.refresh()
        if changed or self._seen is None:
            self._seen = self._catalogue.entries

    def _warn_of_a_long_one(self, now: float) -> None:
        if now >= self._warn_at:
            self._warn_at = float("inf")
            log.warning(
                "catalogue_takes_long", roots=[_sayable(str(root)) for root in self._catalogue.roots], seconds=LONG_SCAN_S
            )


def _status_of_file(file: Path) -> os.stat_result:
    """Its size and more. Raises OSError for what would hang whoever reads it, such as a pipe."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    return status


def _sayable(text: str) -> str:
    """Without what no file can hold as UTF-8, such as the bytes of a name in another encoding."""
    return text.encode(errors="backslashreplace").decode()


def _described(config: dict[str, Any]) -> tuple[str, Task, int, int]:
    """(architecture, task, context, vocabulary) of a config.json, ours or Hugging Face's; 0 and "" for what it does not say."""
    if config.get("model_type") == TINY:
        sizes = config.get("architecture")
        sizes = sizes if isinstance(sizes, dict) else {}
        ours: Task = "sequence_classification" if config.get("head") == "scalar" else "causal_lm"
        return TINY, ours, _size(sizes.get("context")), _size(sizes.get("vocab"))
    architecture = _architecture(config)
    task: Task = ""
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        task = "causal_lm"
    elif architecture.endswith("ForSequenceClassification"):
        task = "sequence_classification"
    context = _size(config.get("max_position_embeddings")) or _size(config.get("n_positions"))
    return architecture, task, context, _size(config.get("vocab_size"))


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return first if isinstance(first, str) and first.isprintable() and len(first) <= MAX_ARCHITECTURE else ""


def _size(value: object) -> int:
    """A number of tokens; 0, which means unknown, for what is none, such as the -1 of models without a limit."""
    return int(value) if isinstance(value, int | float) and 0 < value <= MAX_TOKENS else 0


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _row_count(file: Path) -> int:
    rows, last = 0, b"\n"
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            rows += block.count(b"\n")
            last = block[-1:]
    return rows if last == b"\n" else rows + 1
