"""Scans the worker's roots for model folders and prompt files. Submit validates specs against the result."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import structlog

from oppo_contract.model_folder import (
    PICKLED,
    TINY,
    ModelFolderError,
    check_links,
    check_model_files,
    config_sizes,
    count_weights,
    hub_allowed,
    link_problem,
    read_config,
    tokenizer_digest,
    weight_files,
)
from oppo_contract.prompt_files import FORMATS, JSON_LINES, PARQUET, SHARD, PromptFilesError, expand, format_of, split_names
from oppo_contract.wire import ANY_HUB_MODEL, MAX_ARCHITECTURE, MAX_ID, MAX_PROBLEM, MAX_TOKENS, CatalogueEntry
from worker.engine_process import DEFAULT_ENGINE, engine_program

MAX_DEPTH = 4
MAX_ENTRIES = 2000
MAX_COUNTED_BYTES = 1 << 30  # of an Arrow file, whose rows are counted by reading it
SCAN_EVERY_S = 1.0  # less than a heartbeat: with each of them, unless scans take long
CHANGED_PAUSE_S = 10.0  # after a scan that found changes, each of which the platform stores: files may be growing
SCAN_SHARE = 0.01  # maximum share of time spent scanning
FIRST_SCAN_TIMEOUT_S = 0.5  # so that the first heartbeat has a catalogue
SCAN_TIMEOUT_S = 0.05  # so that the same heartbeat has what a quick scan found
SLOW_SCAN_S = 60.0  # logs a warning
RULES, REWARD_HOSTS = "oppo.rules", "OPPO_REWARD_HOSTS"  # group of entry points, and setting, of the engine (`oppo_core.rewards`)
Task = Literal["causal_lm", "sequence_classification", ""]
Kind = Literal["model", "prompts"]

log = structlog.get_logger("worker.catalogue")


def reward_entries() -> list[CatalogueEntry]:
    """Rules that the engine finds among installed packages, and reward services that the operator allows.

    None for an engine in another environment: its packages are not known here, so that submit does not check rules.
    """
    if engine_program() != DEFAULT_ENGINE:
        return []
    rules = sorted(set(entry_points(group=RULES).names))
    hosts = sorted(set(os.environ.get(REWARD_HOSTS, "").replace(",", " ").split()))
    return [
        *(CatalogueEntry(id=name, kind="rule", bytes=0) for name in rules),
        *(CatalogueEntry(id=host, kind="reward_host", bytes=0) for host in hosts if len(host) <= MAX_ID),
    ]


@dataclass(slots=True)
class Catalogue:
    """Scans the roots. Digests and row counts, which read whole files, are cached by (path, size, mtime)."""

    roots: list[Path]
    entries: list[CatalogueEntry] = field(default_factory=list)
    _cache: dict[tuple[Callable[[Path], str | int], Path, int, int], str] = field(default_factory=dict)
    _skipped: set[Path] = field(default_factory=set)
    _next_scan: float = 0.0

    def due(self, now_s: float) -> bool:
        """Whether the next scan is due."""
        return now_s >= self._next_scan

    def refresh(self, now_s: float | None = None) -> bool:
        """Scan if due. Returns whether the entries changed."""
        now_s = time.monotonic() if now_s is None else now_s
        if not self.due(now_s):
            return False
        started, changed = time.monotonic(), False
        try:
            entries = self._scan()
            changed, self.entries = entries != self.entries, entries
        finally:
            took = time.monotonic() - started
            self._next_scan = now_s + max(CHANGED_PAUSE_S if changed else SCAN_EVERY_S, took / SCAN_SHARE)
        return changed

    def _scan(self) -> list[CatalogueEntry]:
        entries, places = dict[str, CatalogueEntry](), dict[str, Path]()
        if hub_allowed():
            entries[ANY_HUB_MODEL] = CatalogueEntry(id=ANY_HUB_MODEL, kind="hub", bytes=0)
        for root, entry in ((folder, found) for folder in self.roots for found in self._walk(folder)):
            # As `find`, which takes the first root where it exists and no link leads out.
            if entry.id not in entries or link_problem(places[entry.id], self.roots):
                entries[entry.id], places[entry.id] = entry, root / entry.id
            if len(entries) >= MAX_ENTRIES:
                break
        return list(entries.values())

    def _walk(self, root: Path) -> Iterator[CatalogueEntry]:
        for folder, subfolders, files in os.walk(root, followlinks=True):
            here = Path(folder)
            depth = len(here.relative_to(root).parts)
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(".")) if depth < MAX_DEPTH else []
            pickled = any(fnmatch(name, PICKLED) for name in files)
            if ("config.json" in files or pickled) and here != root:
                subfolders[:] = []  # files below a model folder belong to the model
                yield from self._describe("model", here, root)
                continue
            parts = here != root and len(files) > 1 and all(SHARD.search(name) and Path(name).suffix in FORMATS for name in files)
            if parts and len(split_names(files)) == 1:
                yield from self._describe("prompts", here, root)
            for name in sorted(files):
                if Path(name).suffix in FORMATS:
                    yield from self._describe("prompts", here / name, root)
                elif name.endswith(".gguf") or not os.path.exists(here / name):  # or a link to nothing, most likely to a model
                    yield from self._describe("model", here / name, root)

    def _describe(self, kind: Kind, path: Path, root: Path) -> list[CatalogueEntry]:
        """The entry of a path, with its problem if it cannot be used; empty if its name cannot be sent, which is logged once."""
        name, problem = path.relative_to(root).as_posix(), link_problem(path, self.roots)
        try:
            if not problem:
                return [self._model(path, name) if kind == "model" else self._prompts(path, name)]
        except ModelFolderError as error:
            problem = str(error)
        except Exception as error:
            if not isinstance(error, OSError | ValueError | RecursionError):
                log.exception("unreadable_entry", path=_to_utf8(str(path)))
            problem = f"{path} cannot be read: {error}"
        if _to_utf8(name) == name and len(name) <= MAX_ID:
            return [CatalogueEntry(id=name, kind=kind, bytes=0, problem=_to_utf8(problem)[:MAX_PROBLEM])]
        if path not in self._skipped:
            log.warning("left_out_of_catalogue", path=_to_utf8(str(path)), detail="its name is not UTF-8, or too long")
        self._skipped.add(path)
        return []

    def _model(self, folder: Path, name: str) -> CatalogueEntry:
        check_model_files(folder, self.roots)
        _stat_regular(folder / "config.json")
        config = read_config(folder)
        sizes = [file.stat().st_size for file in weight_files(folder)]
        tokenizer = folder / "tokenizer.json"
        digest = self._cached(tokenizer, tokenizer_digest) if tokenizer.is_file() else ""
        architecture, task, context, vocab = _parse_config(config)
        layers, width, cached = _shape(config)
        return CatalogueEntry(
            id=name, kind="model", bytes=sum(sizes), architecture=architecture, task=task, tokenizer_digest=digest,
            context=context, vocab=vocab, weights=count_weights(folder) if sizes else 0,
            layers=layers, width=width, cached=cached,
        )  # fmt: skip

    def _prompts(self, file: Path, name: str) -> CatalogueEntry:
        """A file, or a folder of the parts of a dataset."""
        try:
            files = expand([file])
        except PromptFilesError as error:
            raise ModelFolderError(str(error)) from None
        check_links(files, self.roots)
        sizes = [_stat_regular(part).st_size for part in files]
        rows = sum(int(self._cached(part, _row_count)) for part in files)
        return CatalogueEntry(id=name, kind="prompts", bytes=sum(sizes), rows=rows)

    def _cached(self, file: Path, read: Callable[[Path], str | int]) -> str:
        status = file.stat()
        key = (read, file, status.st_size, status.st_mtime_ns)
        if key not in self._cache:
            self._cache[key] = str(read(file))
        return self._cache[key]


class CatalogueScanner:
    """Scans in a thread, so that a hanging root or a large file delays no heartbeat."""

    def __init__(self, roots: list[Path]) -> None:
        self._catalogue = Catalogue(roots)
        self._rewards: list[CatalogueEntry] = []
        self._entries: list[CatalogueEntry] | None = None
        self._acknowledged: list[CatalogueEntry] | None = None
        self._thread: threading.Thread | None = None
        self._warn_at = float("inf")

    def unsent(self, *, requested: bool = False) -> list[CatalogueEntry] | None:
        """The entries for the next heartbeat if they changed or are `requested`; None before the end of the first scan."""
        now = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            self._warn_if_slow(now)
        elif self._catalogue.due(now):
            self._start(now)
        return self._entries if requested or self._entries is not self._acknowledged else None

    def acknowledge(self, entries: list[CatalogueEntry]) -> None:
        """The platform has received these entries."""
        self._acknowledged = entries

    def _start(self, now: float) -> None:
        first, thread = self._thread is None, threading.Thread(target=self._run, name="catalogue", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            log.warning("catalogue_not_scanned", detail=str(error))
            return
        self._thread, self._warn_at = thread, now + SLOW_SCAN_S
        thread.join(FIRST_SCAN_TIMEOUT_S if first else SCAN_TIMEOUT_S)

    def _run(self) -> None:
        changed = self._catalogue.refresh()
        rewards = reward_entries()  # again, because a package may have been installed since; engines find its rules too
        if changed or rewards != self._rewards or self._entries is None:
            self._rewards, self._entries = rewards, rewards + self._catalogue.entries

    def _warn_if_slow(self, now: float) -> None:
        if now >= self._warn_at:
            self._warn_at = float("inf")
            log.warning(
                "catalogue_takes_long", roots=[_to_utf8(str(root)) for root in self._catalogue.roots], seconds=SLOW_SCAN_S
            )


def _stat_regular(file: Path) -> os.stat_result:
    """Raises OSError unless it is a regular file: reading a pipe would hang."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    return status


def _to_utf8(text: str) -> str:
    """Escape surrogates, such as bytes of a file name in another encoding."""
    return text.encode(errors="backslashreplace").decode()


def _parse_config(config: dict[str, Any]) -> tuple[str, Task, int, int]:
    """(architecture, task, context, vocabulary) of a config.json, ours or Hugging Face's; unknown values are 0 or empty."""
    if config.get("model_type") == TINY:
        sizes = config.get("architecture")
        sizes = sizes if isinstance(sizes, dict) else {}
        tiny_task: Task = "sequence_classification" if config.get("head") == "scalar" else "causal_lm"
        return TINY, tiny_task, _size(sizes.get("context")), _size(sizes.get("vocab"))
    architecture = _architecture(config)
    task: Task = ""
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        task = "causal_lm"
    elif architecture.endswith("ForSequenceClassification"):
        task = "sequence_classification"
    context = _size(config.get("max_position_embeddings")) or _size(config.get("n_positions"))
    return architecture, task, context, _size(config.get("vocab_size"))


def _shape(config: dict[str, Any]) -> tuple[int, int, int]:
    """(layers, hidden size, numbers cached per token) of a config.json, which the platform's plan needs; zeros if unknown."""
    sizes = config_sizes(config)
    shape = (0, 0, 0) if sizes is None else (sizes.layers, sizes.width, sizes.cached)
    return shape if max(shape) <= MAX_TOKENS else (0, 0, 0)


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else config.get("model_type")
    return first if isinstance(first, str) and first.isprintable() and len(first) <= MAX_ARCHITECTURE else ""


def _size(value: object) -> int:
    """A number of tokens; 0 (unknown) for other values, such as -1 of models without a limit."""
    return int(value) if isinstance(value, int | float) and 0 < value <= MAX_TOKENS else 0


def _row_count(file: Path) -> int:
    """Records of a prompts file; of a columnar one by its metadata, or 0 (unknown) without pyarrow."""
    if format_of(file) == JSON_LINES:
        return _line_count(file)
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        return 0
    try:
        # No memory map: a file that is truncated while it is mapped kills the process.
        with pyarrow.OSFile(str(file)) as source:
            if format_of(file) == PARQUET:
                return int(pyarrow.parquet.read_metadata(source).num_rows)
            return _arrow_rows(pyarrow, source) if file.stat().st_size <= MAX_COUNTED_BYTES else 0
    except pyarrow.ArrowException as error:
        raise ModelFolderError(f"{file} is not a complete {format_of(file)} file: {error}") from None


def _arrow_rows(pyarrow: Any, source: Any) -> int:
    """Rows of Arrow's file or stream format, which has them in each batch: the whole file is read."""
    try:
        reader = pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return sum(batch.num_rows for batch in pyarrow.ipc.open_stream(source))
    return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))


def _line_count(file: Path) -> int:
    rows, last = 0, b"\n"
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            rows += block.count(b"\n")
            last = block[-1:]
    return rows if last == b"\n" else rows + 1
