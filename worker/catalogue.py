"""What lies below the worker's roots: model folders and sets of prompts, so that submit can check against it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oppo_contract.wire import CatalogueEntry

MAX_DEPTH = 4
MAX_ENTRIES = 2000
SCAN_EVERY_S = 10.0
SCAN_SHARE = 0.01  # of the time, at most
TINY = "oppo_tiny"
Task = Literal["causal_lm", "sequence_classification", ""]


@dataclass(slots=True)
class Catalogue:
    """Scans the roots; facts that need reading whole files are kept by (path, size, time of change)."""

    roots: list[Path]
    entries: list[CatalogueEntry] = field(default_factory=list)
    _facts: dict[tuple[str, int, int], str] = field(default_factory=dict)
    _next_scan: float = 0.0

    def refresh(self, now_s: float | None = None, *, wanted: bool = False) -> bool:
        """Scan when it is due or `wanted`; returns whether the entries changed."""
        now_s = time.monotonic() if now_s is None else now_s
        if now_s < self._next_scan and not wanted:
            return False
        started = time.monotonic()
        found = self._scan()
        took = time.monotonic() - started
        self._next_scan = now_s + max(SCAN_EVERY_S, took / SCAN_SHARE)
        changed = found != self.entries
        self.entries = found
        return changed

    def _scan(self) -> list[CatalogueEntry]:
        found: dict[str, CatalogueEntry] = {}
        for root in self.roots:
            for folder, subfolders, files in os.walk(root, followlinks=True):
                here = Path(folder)
                depth = len(here.relative_to(root).parts)
                subfolders[:] = sorted(name for name in subfolders if not name.startswith(".")) if depth < MAX_DEPTH else []
                if "config.json" in files and here != root:
                    subfolders[:] = []  # what lies in a model folder belongs to the model
                    entry = self._model(here, here.relative_to(root).as_posix())
                    if entry is not None:
                        found.setdefault(entry.id, entry)
                    continue
                for name in sorted(name for name in files if name.endswith(".jsonl")):
                    prompts = self._prompts(here / name, (here / name).relative_to(root).as_posix())
                    found.setdefault(prompts.id, prompts)
                if len(found) >= MAX_ENTRIES:
                    return list(found.values())
        return list(found.values())

    def _model(self, folder: Path, name: str) -> CatalogueEntry | None:
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):  # being written, or something else's config.json
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
        return CatalogueEntry(id=name, kind="prompts", bytes=file.stat().st_size, rows=int(self._fact(file, _row_count)))

    def _fact(self, file: Path, read: Any) -> str:
        status = file.stat()
        key = (f"{read.__name__} {file}", status.st_size, status.st_mtime_ns)
        if key not in self._facts:
            self._facts[key] = str(read(file))
        return self._facts[key]


def _described(config: dict[str, Any]) -> tuple[str, Task, int, int]:
    """(architecture, task, context, vocabulary) of a config.json, ours or Hugging Face's."""
    if config.get("model_type") == TINY:
        sizes = config.get("architecture", {})
        return (
            TINY,
            "sequence_classification" if config.get("head") == "scalar" else "causal_lm",
            sizes["context"],
            sizes["vocab"],
        )
    named = config.get("architectures") or [config.get("model_type", "")]
    architecture = str(named[0])
    task: Task = ""
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        task = "causal_lm"
    elif architecture.endswith("ForSequenceClassification"):
        task = "sequence_classification"
    context = config.get("max_position_embeddings") or config.get("n_positions") or 0
    return architecture, task, int(context), int(config.get("vocab_size") or 0)


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
