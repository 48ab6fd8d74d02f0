"""Reads records from prompts files: JSON Lines, and by pyarrow Parquet and Arrow's IPC formats (Feather, `datasets`)."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oppo_contract.prompt_files import JSON_LINES, PARQUET, format_of

BATCH_ROWS = 1024
# Types of columns that JSON, in which rewards get records, does not have; their text is used.
AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


class PromptError(ValueError):
    """An invalid prompts file; the message names file and line, or row."""


def iter_records(
    files: Sequence[Path], columns: Mapping[str, str] | None = None, setting: str = "data"
) -> Iterator[tuple[Any, str]]:
    """Yield each record of all files, in order, with its file and line (or row) for error messages.

    Args:
        columns: new names of columns, `{new: old}`.
        setting: the spec's section that names `columns`, for error messages.

    Raises:
        PromptError: a file is empty, damaged, not JSON, lacks a column, or has other columns than the first one.
    """
    _check_schemas([file for file in files if format_of(file) != JSON_LINES])
    for file in files:
        empty = True
        for record, where in _lines(file) if format_of(file) == JSON_LINES else _rows(file):
            empty = False
            yield _renamed(record, columns or {}, where, setting), where
        if empty:
            raise PromptError(f"{file.name} holds no prompt")


def _renamed(record: Any, columns: Mapping[str, str], where: str, setting: str) -> Any:
    if not columns or not isinstance(record, dict):
        return record
    for old in columns.values():
        if old not in record:
            raise PromptError(f"{where}: has no column {old!r} ({setting}.columns); it has {', '.join(record)}")
    kept = {name: value for name, value in record.items() if name not in columns.values()}
    return kept | {new: record[old] for new, old in columns.items()}


def _lines(file: Path) -> Iterator[tuple[Any, str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file.name}, line {number}"
            if line.strip():
                yield _parse(line, where), where


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(f"{where}: not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON: {error.msg}, at character {error.pos + 1}") from None


def _rows(file: Path) -> Iterator[tuple[Any, str]]:
    number = 0
    with _opened(file) as (_, batches):
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield {name: _plain(value) for name, value in row.items()}, f"{file.name}, row {number}"


def _plain(value: Any) -> Any:
    """A value as JSON has it: no NaN, and without fields that a struct of the column has and this one lacks."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, AS_TEXT) else value


def _check_schemas(files: Sequence[Path]) -> None:
    """Raise PromptError unless all files have the columns of the first one, with the same types."""
    first: dict[str, str] = {}
    for file in files:
        with _opened(file) as (schema, _):
            columns = {field.name: str(field.type) for field in schema}
        first = first or columns
        for name in [*first, *columns]:
            if first.get(name) != columns.get(name):
                kinds = [f"{kinds[name]}" if name in kinds else "missing" for kinds in (columns, first)]
                raise PromptError(f"{file.name}: column {name!r} is {kinds[0]}, and {kinds[1]} in {files[0].name}")


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the record batches of a columnar file. Raises PromptError, also while batches are read."""
    kind = format_of(file)
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise PromptError(f"{file.name}: {kind} files need pyarrow, which is not installed here: pip install pyarrow") from None
    try:
        with pyarrow.OSFile(str(file)) as source:
            if kind == PARQUET:
                parquet = pyarrow.parquet.ParquetFile(source)
                yield parquet.schema_arrow, parquet.iter_batches(BATCH_ROWS)
            else:
                yield from _ipc(pyarrow, source)
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(f"{file.name} is not a complete {kind} file: {error}") from None


def _ipc(pyarrow: Any, source: Any) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Arrow's file format (Feather), or its stream format, which `datasets` writes."""
    try:
        reader = pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        reader = pyarrow.ipc.open_stream(source)
        yield reader.schema, iter(reader)
    else:
        yield reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
