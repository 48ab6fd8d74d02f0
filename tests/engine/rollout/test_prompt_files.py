"""Prompts from JSON Lines, Parquet and Arrow files, with renamed columns; bad input is named with file and row."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rollout.prompt_files import PromptError, iter_records
from oppo_core.rollout.prompts import prompt_files, read_prompts
from oppo_core.rollout.tokenizer import ByteCodec

CODEC = ByteCodec(300)
ROWS = [{"question": "one", "answer": 1}, {"question": "two", "answer": 2}, {"question": "three", "answer": 3}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the suffix; `.arrow` as `datasets` writes it, `.ipc` as a file."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path)
    else:
        opened = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
        with opened(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".ipc", ".feather"])
def test_every_format_gives_the_same_prompts_and_records(tmp_path: Path, suffix: str) -> None:
    files = [write(tmp_path / f"{n}{suffix}", ROWS[n : n + 2]) for n in (0, 1)]
    columns = {"prompt": "question", "solution": "answer"}
    read = read_prompts(files, "prompt", CODEC, 50, columns=columns)
    assert [row.tolist() for row in read] == [CODEC.encode(text) for text in ("one", "two", "two", "three")]
    records = PromptRecords()
    records.read(files, "prompt", CODEC, 50, columns)
    assert records.record(CODEC.encode("three")) == {"prompt": "three", "solution": 3}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_of_messages_is_a_list_of_structs(tmp_path: Path, suffix: str) -> None:
    talk = [{"role": "user", "content": "add", "name": "ada"}, {"role": "assistant", "content": "two", "name": None}]
    file = write(tmp_path / f"chat{suffix}", [{"messages": talk, "at": datetime.date(2026, 1, 2)}])
    ((record, where),) = iter_records([file])
    assert record == {"messages": [talk[0], {"role": "assistant", "content": "two"}], "at": "2026-01-02"}
    assert where == f"chat{suffix}, row 1"


def test_a_run_trains_on_a_folder_of_parquet_files(world: Any, tmp_path: Path) -> None:
    """And resumes only with the same prompts in the same order."""
    rows = [json.loads(line) for line in (world.folder / "prompts.jsonl").read_text().splitlines()]
    (tmp_path / "parts").mkdir()
    half = len(rows) // 2
    files = [tmp_path / "parts" / f"train-0000{n}-of-00002.parquet" for n in (0, 1)]
    for file, part in zip(files, (rows[:half], rows[half:]), strict=True):
        write(file, [{"question": row["prompt"], "id": n} for n, row in enumerate(part)])
    changes = {"steps": 1, "overlap": {"intra_step": "off"}}

    def data(prompts: Any) -> dict[str, Any]:
        return {"data": {"prompts": prompts, "columns": {"prompt": "question"}}}

    run = world.run(world.spec(changes, data(str(tmp_path / "parts"))), tmp_path / "run")
    plain = world.run(world.spec(changes), tmp_path / "plain")
    assert run.engine.prompts.digest == plain.engine.prompts.digest
    assert [s.sequence_id for s in run.steps[0].experience.sequences] == [
        s.sequence_id for s in plain.steps[0].experience.sequences
    ]
    checkpoint = next((run.out / "checkpoints").glob("step-*"))
    listed = world.tree(changes, {"steps": 2}, data([str(file) for file in files[::-1]]))
    status, events = world.main(listed, tmp_path / "more", "--resume-from", checkpoint)
    assert (status, "data.prompts" in events[-1].reason) == (1, True)


def failure(files: list[Path], **more: Any) -> str:
    with pytest.raises(PromptError) as error:
        read_prompts(files, "prompt", CODEC, 50, **more)
    return str(error.value)


def test_bad_input_is_named_with_file_column_and_row(tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", [{"prompt": "one", "n": 1}, {"prompt": "two", "n": 2}])
    assert failure([write(tmp_path / "a.parquet", ROWS)]) == (
        "a.parquet, row 1: has no 'prompt' (data.prompt_field); it has question, answer"
    )
    assert failure([good], columns={"prompt": "question"}) == (
        "good.parquet, row 1: has no column 'question' (data.columns); it has prompt, n"
    )
    number = write(tmp_path / "number.parquet", [{"prompt": 3.5}])
    assert failure([number]).startswith("number.parquet, row 1: 'prompt' must be text, a list of messages")
    missing = write(tmp_path / "null.parquet", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": None}])
    assert failure([missing]).startswith("null.parquet, row 3: 'prompt' must be text")
    other = write(tmp_path / "other.parquet", [{"prompt": "one", "n": "1"}])
    assert failure([good, other]) == "other.parquet: column 'n' is string, and int64 in good.parquet"
    less = write(tmp_path / "less.parquet", [{"prompt": "one"}])
    assert failure([good, less]) == "less.parquet: column 'n' is missing, and int64 in good.parquet"
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "n": pa.array([], pa.int64())}), empty)
    assert failure([good, empty]) == "empty.parquet holds no prompt"
    (tmp_path / "empty.jsonl").write_text("\n")
    assert failure([tmp_path / "empty.jsonl"]) == "empty.jsonl holds no prompt"


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"cut{suffix}", [{"prompt": f"{n} {n}"} for n in range(200)])
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert failure([file]).startswith(f"cut{suffix} is not a complete {'Parquet' if suffix == '.parquet' else 'Arrow'} file: ")


def test_a_list_of_several_formats_and_an_empty_folder_are_refused(world: Any, tmp_path: Path) -> None:
    def error(prompts: Any) -> str:
        with pytest.raises(PromptError) as caught:
            prompt_files(world.spec({"data": {"prompts": prompts}}).data, [])
        return str(caught.value)

    lines, table = (str(write(tmp_path / f"a{suffix}", [{"prompt": "x"}])) for suffix in (".jsonl", ".parquet"))
    said = "files of several formats, JSON Lines (a.jsonl) and Parquet (a.parquet); give files of one format"
    assert said in error([lines, table])
    assert "Parquet (a.parquet) and JSON Lines (a.jsonl)" in error([table, lines])
    assert error([lines, lines]) == f"{lines} is given twice"
    (tmp_path / "both").mkdir()
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        write(tmp_path / "both" / name, [{"prompt": "x"}])
    assert f"{tmp_path}/both holds the files of several sets, test, train; list the files of one" in error(str(tmp_path / "both"))
    (tmp_path / "none").mkdir()
    assert error(str(tmp_path / "none")).startswith(f"{tmp_path}/none holds no prompts file (.jsonl, .parquet, ")


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", [{"prompt": "x"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert failure([file]) == "a.parquet: Parquet files need pyarrow, which is not installed here: pip install pyarrow"


def test_a_binary_column_is_no_part_of_a_record(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"prompt": "x", "image": b"png"}])
    assert np.array_equal(read_prompts(file, "prompt", CODEC, 9)[0], CODEC.encode("x"))
    with pytest.raises(RewardError, match=r"a\.parquet, row 1: column 'image' is binary"):
        PromptRecords().read(file, "prompt", CODEC, 9)
    file = write(tmp_path / "b.parquet", [{"prompt": "x", "image": {"bytes": b"png", "path": None}}])
    with pytest.raises(RewardError, match=r"b\.parquet, row 1: column 'image' is binary"):
        PromptRecords().read(file, "prompt", CODEC, 9)


def test_a_number_that_json_lacks_is_none(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"prompt": "x", "weight": float("nan")}])
    records = PromptRecords()
    records.read([file, write(tmp_path / "b.parquet", [{"prompt": "x", "weight": float("nan")}])], "prompt", CODEC, 9)
    assert records.record(CODEC.encode("x")) == {"prompt": "x", "weight": None}
