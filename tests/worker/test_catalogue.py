"""The catalogue scan, and containment of artifact paths."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import structlog

from oppo_contract.model_folder import ModelFolderError, check_links, count_weights, find, find_model, tokenizer_digest
from oppo_contract.wire import CatalogueEntry
from worker import catalogue
from worker.artifacts import ArtifactError, FileStore, contained, url_path
from worker.catalogue import Catalogue, CatalogueScanner, _parse_config, reward_entries

HEADER = b'{"a": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(24)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with our own models, Hugging Face's, and prompts."""
    tokenizer = b'{"a": "tokenizer"}'
    models = {
        "letters/actor": {"model_type": "oppo_tiny", "head": "lm", "architecture": {"context": 400, "vocab": 64}},
        "letters/reward": {"model_type": "oppo_tiny", "head": "scalar", "architecture": {"context": 400, "vocab": 64}},
        "qwen": {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "vocab_size": 151936},
        "llama-rm": {"architectures": ["LlamaForSequenceClassification"], "max_position_embeddings": 4096, "vocab_size": 32000},
    }
    for name, config in models.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(WEIGHTS)
        (folder / "tokenizer.json").write_bytes(tokenizer)
    (tmp_path / "letters" / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}')
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "secret.jsonl").write_text("{}\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{half")
    return tmp_path


def test_models_and_prompts_are_found_and_described(root: Path) -> None:
    catalogue = Catalogue([root])
    assert catalogue.refresh()
    entries = {entry.id: entry for entry in catalogue.entries}
    assert set(entries) == {"letters/actor", "letters/reward", "letters/prompts.jsonl", "qwen", "llama-rm", "broken"}
    assert {id for id, entry in entries.items() if entry.problem} == {"broken"}
    assert entries["letters/actor"].task == "causal_lm"
    assert entries["letters/reward"].task == "sequence_classification"
    assert (entries["qwen"].context, entries["qwen"].vocab, entries["qwen"].bytes) == (32768, 151936, len(WEIGHTS))
    assert entries["qwen"].weights == 6
    assert entries["llama-rm"].task == "sequence_classification"
    assert entries["qwen"].tokenizer_digest == tokenizer_digest(root / "qwen" / "tokenizer.json")
    assert entries["letters/prompts.jsonl"].rows == 2


def test_refresh_reports_changes_only(root: Path) -> None:
    catalogue = Catalogue([root])
    assert catalogue.refresh(0.0)
    assert not catalogue.refresh(1e6)
    with (root / "letters" / "prompts.jsonl").open("a") as prompts:
        prompts.write("\n{}\n")
    assert catalogue.refresh(2e6)
    assert {entry.rows for entry in catalogue.entries if entry.kind == "prompts"} == {3}
    assert not catalogue.due(2e6 + 9), "changes are stored by the platform: no more often than every ten seconds"
    assert not catalogue.refresh(2e6 + 11)
    assert not catalogue.due(2e6 + 11.5)
    (root / "letters" / "new.jsonl").write_text("{}\n")
    assert catalogue.refresh(2e6 + 13), "what is new is found with the next heartbeat"


def test_an_entry_that_cannot_be_used_is_listed_with_its_problem(root: Path) -> None:
    (root / "pruned.jsonl").symlink_to(root / "gone")
    (root / "lost-7B").symlink_to(root / "nowhere")
    (root / "llama-rm" / "pruned.safetensors").symlink_to(root / "gone-too")
    os.mkfifo(root / "pipe.jsonl")
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.jsonl")).write_text("{}")
    (root / "qwen" / "config.json").write_text("[" * 100_000)
    (root / "letters" / "actor" / "model.safetensors").write_bytes(WEIGHTS[:20])
    catalogue = Catalogue([root])
    with structlog.testing.capture_logs() as said:
        assert catalogue.refresh(0.0)
        assert not catalogue.refresh(1e6)
    problems = {entry.id: entry.problem for entry in catalogue.entries if entry.problem}
    assert problems.keys() == {"pruned.jsonl", "lost-7B", "llama-rm", "pipe.jsonl", "qwen", "broken", "letters/actor"}
    assert problems["letters/actor"].endswith("actor/model.safetensors is not a complete safetensors file; copy it again")
    assert problems["pruned.jsonl"] == f"{root}/pruned.jsonl is a link to {root}/gone, which does not exist"
    assert problems["lost-7B"] == f"{root}/lost-7B is a link to {root}/nowhere, which does not exist"
    assert problems["pipe.jsonl"] == f"{root}/pipe.jsonl cannot be read: not a regular file"
    assert problems["broken"].startswith(f"{root}/broken/config.json is not JSON")
    assert [Path(entry["path"]).name for entry in said] == ["caf\\udce9.jsonl"], "its name cannot be sent; said once"
    (root / "gone").write_text("{}\n")
    (root / "gone-too").write_bytes(WEIGHTS)
    assert catalogue.refresh(2e6)
    assert {"pruned.jsonl", "llama-rm"} <= {entry.id for entry in catalogue.entries if not entry.problem}


def test_weights_of_another_format_are_listed_with_the_command_that_converts_them(root: Path) -> None:
    (root / "small.gguf").write_bytes(b"GGUF")
    (root / "old").mkdir()
    (root / "old" / "pytorch_model-00001-of-00002.bin").write_bytes(b"pickle")
    for name in ("quantised", "qwen"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "model.gguf").write_bytes(b"GGUF")
    (root / "quantised" / "config.json").write_text("{}")
    catalogue = Catalogue([root])
    catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries if entry.kind == "model"}
    needs = "a model is a folder with config.json and safetensors; convert it: oppo convert"
    assert problems["small.gguf"] == f"{root}/small.gguf is a file; {needs} {root}/small.gguf FOLDER"
    assert problems["old"] == f"{root}/old has its weights in pytorch_model-00001-of-00002.bin only; {needs} {root}/old FOLDER"
    assert problems["quantised"] == f"{root}/quantised has its weights in model.gguf only; {needs} {root}/quantised FOLDER"
    assert problems["qwen"] == "", "it has safetensors too"


def test_columnar_prompts_are_counted_by_their_metadata(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"prompt": [f"prompt {n}" for n in range(70)]})
    parts = root / "set"
    parts.mkdir()
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
        pq.write_table(table, parts / name)
    with pa.ipc.new_stream(root / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    with pa.ipc.new_file(root / "file.feather", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    (root / "cut.parquet").write_bytes((parts / "train-00000-of-00002.parquet").read_bytes()[:100])
    catalogue = Catalogue([root])
    catalogue.refresh()
    rows = {entry.id: entry.rows for entry in catalogue.entries if entry.kind == "prompts"}
    assert (rows["stream.arrow"], rows["file.feather"], rows["set/train-00000-of-00002.parquet"], rows["set"]) == (
        70,
        70,
        70,
        140,
    )
    (cut,) = [entry for entry in catalogue.entries if entry.id == "cut.parquet"]
    assert cut.problem.startswith(f"{root}/cut.parquet is not a complete Parquet file: ")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    without = Catalogue([root])
    without.refresh()
    assert {entry.rows for entry in without.entries if entry.id in ("set", "stream.arrow")} == {0}, "unknown"


def test_links_are_followed_inside_the_roots_and_named_outside_as_the_engine_does(root: Path, tmp_path_factory: Any) -> None:
    other, outside = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("outside")
    for folder in (other, outside):
        shutil.copytree(root / "qwen", folder / "model")
        shutil.copy(root / "letters" / "prompts.jsonl", folder)
    for name, target in {"in": other / "model", "out": outside / "model", "in.jsonl": other / "prompts.jsonl"}.items():
        (root / name).symlink_to(target)
    (root / "out.jsonl").symlink_to(outside / "prompts.jsonl")
    roots = [root, other]
    catalogue = Catalogue(roots)
    catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries if "." not in entry.id or entry.id.endswith("jsonl")}
    assert (problems["in"], problems["in.jsonl"]) == ("", "")
    assert find("in", roots) == (other / "model").resolve()
    for name, target in {"out": outside / "model", "out.jsonl": outside / "prompts.jsonl"}.items():
        said = f"{root}/{name} is a link to {target}, outside the models roots {root}, {other}; copy it or move it there"
        assert problems[name].startswith(said)
        with pytest.raises(ModelFolderError, match=re.escape(said)):
            find(name, roots)
    shutil.copytree(root / "qwen", other / "out")
    catalogue.refresh(1e9)
    assert [entry.problem for entry in catalogue.entries if entry.id == "out"] == [""], "another root has it"
    assert find("out", roots) == other / "out"


def test_shapes_of_models_are_those_that_the_estimate_reads(tmp_path: Path) -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 128,
    }  # fmt: skip
    tiny = {"hidden": 32, "layers": 2, "heads": 4, "context": 64, "vocab": 16}
    configs = {
        "llama": llama, "nested": {"architectures": ["X"], "text_config": llama},
        "ours": {"model_type": "oppo_tiny", "architecture": tiny},
        "other": llama | {"hidden_size": "wide"}, "huge": llama | {"hidden_size": 2**40},
    }  # fmt: skip
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    catalogue = Catalogue([tmp_path])
    catalogue.refresh()
    shapes = {entry.id: (entry.layers, entry.width, entry.cached) for entry in catalogue.entries}
    llama_shape = (3, 64, 2 * 3 * 2 * 16)
    unknown = (0, 0, 0)
    assert shapes == {
        "llama": llama_shape, "nested": llama_shape, "ours": (2, 32, 128), "other": unknown, "huge": unknown,
    }  # fmt: skip


@pytest.mark.parametrize("odd", [-1, 1e400, 2**31, "many", [4096], {"text": 1}, None])
def test_invalid_sizes_are_unknown(odd: object) -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": odd, "vocab_size": odd}
    assert _parse_config(config) == ("Qwen2ForCausalLM", "causal_lm", 0, 0)
    assert _parse_config(config | {"n_positions": 1024})[2] == 1024
    assert _parse_config({"model_type": "oppo_tiny", "architecture": odd}) == ("oppo_tiny", "causal_lm", 0, 0)
    assert _parse_config({"model_type": "oppo_tiny", "architecture": {"context": odd, "vocab": 64}})[2:] == (0, 64)


@pytest.mark.parametrize("odd", [[7], [], {"a": 1}, "A" * 201, ["nul\0ForCausalLM"], [None]])
def test_invalid_architecture_names_are_empty(odd: object) -> None:
    assert _parse_config({"architectures": odd, "model_type": 3}) == ("", "", 0, 0)


def test_catalogue_is_limited_to_max_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.catalogue.MAX_ENTRIES", 3)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").touch()
    catalogue = Catalogue([tmp_path])
    catalogue.refresh()
    assert len(catalogue.entries) == 3


def test_hanging_root_does_not_block(root: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, scan = threading.Event(), Catalogue._scan

    def hangs(catalogue: Catalogue) -> list[CatalogueEntry]:
        goes_on.wait(60)
        return scan(catalogue)

    monkeypatch.setattr(Catalogue, "_scan", hangs)
    monkeypatch.setattr("worker.catalogue.FIRST_SCAN_TIMEOUT_S", 0.01)
    monkeypatch.setattr("worker.catalogue.SLOW_SCAN_S", 0.0)
    watch = CatalogueScanner([root])
    with structlog.testing.capture_logs() as said:
        assert [watch.unsent(requested=True) for _ in range(5)] == [None] * 5, "unknown, not empty"
    assert [entry["event"] for entry in said] == ["catalogue_takes_long"]
    goes_on.set()
    entries = tools.eventually(watch.unsent)
    assert "qwen" in {entry.id for entry in entries}


def test_a_quick_scan_is_sent_with_the_heartbeat_that_began_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(catalogue, "SCAN_SHARE", 1e9)
    monkeypatch.setattr(catalogue, "CHANGED_PAUSE_S", 0.0)
    for timeout in ("FIRST_SCAN_TIMEOUT_S", "SCAN_TIMEOUT_S"):
        monkeypatch.setattr(catalogue, timeout, 60.0)
    scanner = CatalogueScanner([root])
    scanner.acknowledge(scanner.unsent() or [])
    (root / "new.jsonl").write_text("{}\n")
    assert "new.jsonl" in {entry.id for entry in scanner.unsent() or []}


def test_entries_are_resent_until_acknowledged(root: Path) -> None:
    watch = CatalogueScanner([root])
    entries = watch.unsent()
    assert entries
    assert watch.unsent() is entries, "the heartbeat was lost"
    watch.acknowledge(entries)
    assert watch.unsent() is None
    assert watch.unsent(requested=True) is entries


@pytest.mark.parametrize(("allowed", "kinds"), [("1", ["hub"]), ("0", []), ("", [])])
def test_a_worker_that_may_download_from_a_hub_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, kinds: list[str]
) -> None:
    monkeypatch.setenv("OPPO_ALLOW_HUB", allowed)
    catalogue = Catalogue([tmp_path])
    catalogue.refresh()
    assert [entry.kind for entry in catalogue.entries] == kinds


def test_missing_root_is_empty(tmp_path: Path) -> None:
    catalogue = Catalogue([tmp_path / "later"])
    assert not catalogue.refresh()
    assert catalogue.entries == []


@pytest.mark.parametrize("url", ["http://host/a", "file://elsewhere/a", "a/b", "", "file:relative"])
def test_only_local_file_urls_are_taken(url: str) -> None:
    with pytest.raises(ArtifactError):
        url_path(url)


def test_paths_outside_the_store_are_rejected(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "runs").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    store = FileStore(root.as_uri())
    assert store.folder(f"{root.as_uri()}/runs/1") == root / "runs" / "1"
    for outside in ("../x", "runs/../../x", "link/x", "/etc/passwd"):
        with pytest.raises(ArtifactError):
            contained(root, Path(outside))
    for outside in (
        f"{root.as_uri()}/../x",
        f"{root.as_uri()}/%2e%2e/x",
        f"{root.as_uri()}/link/x",
        f"{tmp_path.as_uri()}/rootx",
    ):
        with pytest.raises(ArtifactError):
            store.folder(outside)


@pytest.mark.parametrize(
    "header",
    [
        *('{"a": {}}', '{"a": 1}', '{"a": {"shape": ["x"]}}', '{"a": {"shape": [-1]}}', '{"a": {"shape": [1' + 30 * "0" + "]}}"),
        '{"a": {"shape": [300]}, "b": {"shape": [300]}}',  # each alone could be in the file, both cannot
        '{"a": ' + 100_000 * "[" + 100_000 * "]" + "}",
    ],
)
def test_a_damaged_header_is_the_problem_of_its_entry_alone(root: Path, header: str) -> None:
    (root / "qwen" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    catalogue = Catalogue([root])
    assert catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries}
    assert "is not a complete safetensors file" in problems["qwen"]
    assert not problems["letters/actor"]


def test_the_wire_refuses_a_count_that_the_database_cannot_hold() -> None:
    with pytest.raises(ValueError, match="weights"):
        CatalogueEntry(id="a", kind="model", bytes=0, weights=2**63)


def test_an_unexpected_error_in_one_entry_does_not_end_the_scan(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(folder: Path) -> int:
        raise KeyError("shape")

    monkeypatch.setattr("worker.catalogue.count_weights", surprise)
    catalogue = Catalogue([root])
    assert catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries}
    assert "cannot be read" in problems["qwen"]
    assert not problems["letters/prompts.jsonl"]


def test_a_link_inside_a_folder_of_prompts_does_not_lead_out(tmp_path: Path) -> None:
    """The engine and the catalogue refuse it alike."""
    secret, folder = tmp_path / "secret.jsonl", tmp_path / "root" / "data"
    secret.write_text('{"prompt": "secret"}\n')
    folder.mkdir(parents=True)
    (folder / "a-1-of-2.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "a-2-of-2.jsonl").symlink_to(secret)
    catalogue = Catalogue([tmp_path / "root"])
    catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries}
    assert "outside the models root" in problems["data"]
    with pytest.raises(ModelFolderError, match="outside the models root"):
        check_links(sorted(folder.iterdir()), [tmp_path / "root"])


def test_a_link_that_cannot_be_read_is_one_entry_with_a_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a link into another user's home: the other entries stay."""
    (root / "private").symlink_to("/nonexistent/model")
    (root / "private.jsonl").symlink_to("/nonexistent/prompts.jsonl")
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> Any:
        if str(path).startswith("/nonexistent/"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    catalogue = Catalogue([root])
    catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries}
    said = f"{root}/private leads to /nonexistent/model, which cannot be read: Permission denied"
    assert problems["private"] == said
    assert "cannot be read: Permission denied" in problems["private.jsonl"]
    assert problems["qwen"] == ""
    with pytest.raises(ModelFolderError, match=re.escape(said)):
        find("private", [root])


def test_of_two_roots_the_catalogue_lists_what_the_engine_would_find(root: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(root / "qwen", other / "qwen")
    shutil.copytree(root / "qwen", other / "linked")
    (root / "qwen" / "model.safetensors").rename(root / "qwen" / "pytorch_model.bin")
    (root / "linked").symlink_to(tmp_path_factory.mktemp("outside"))
    catalogue = Catalogue([root, other])
    catalogue.refresh()
    problems = {entry.id: entry.problem for entry in catalogue.entries}
    assert problems["linked"] == ""
    assert find_model("linked", [root, other]) == other / "linked"
    assert "pytorch_model.bin only" in problems["qwen"]
    with pytest.raises(ModelFolderError, match=re.escape(problems["qwen"])):
        find_model("qwen", [root, other])


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_link_inside_a_model_folder_leads_to_a_file_below_the_roots(root: Path, tmp_path_factory: Any, file: str) -> None:
    """As in a hub's own cache, where every file is a link. The engine and the catalogue refuse others alike."""
    link, outside = root / "qwen" / file, tmp_path_factory.mktemp("elsewhere") / "outside"
    link.rename(root / "blob")
    link.symlink_to(root / "blob")
    assert find_model("qwen", [root]) == root / "qwen"
    catalogue = Catalogue([root])
    catalogue.refresh()
    assert {entry.id: entry.problem for entry in catalogue.entries}["qwen"] == ""
    link.unlink()
    for target, problem in ((root / "blob", "outside the models root"), (root / "nothing", "which does not exist")):
        if target.exists():
            target = target.rename(outside)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        catalogue = Catalogue([root])
        catalogue.refresh()
        said = {entry.id: entry.problem for entry in catalogue.entries}["qwen"]
        assert said.startswith(f"{link} is a link to {target}, {problem}")
        with pytest.raises(ModelFolderError, match=re.escape(said)):
            find_model("qwen", [root])


def test_weights_of_a_second_layout_are_not_counted(root: Path) -> None:
    folder = root / "qwen"
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    for name in ("model-2-of-2.safetensors", "consolidated.safetensors"):
        shutil.copy(folder / "model-1-of-2.safetensors", folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}))
    assert count_weights(folder) == 12
    catalogue = Catalogue([root])
    catalogue.refresh()
    assert {entry.id: (entry.weights, entry.bytes) for entry in catalogue.entries}["qwen"] == (12, 2 * len(WEIGHTS))
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="lacks model-2-of-2"):
        count_weights(folder)
    index.write_text("{}")
    with pytest.raises(ModelFolderError, match="is not an index of weights"):
        count_weights(folder)


def test_the_parts_of_two_splits_are_not_offered_as_one_set(root: Path) -> None:
    (root / "gsm").mkdir()
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        (root / "gsm" / name).write_text('{"prompt": "a"}\n')
    catalogue = Catalogue([root])
    catalogue.refresh()
    ids = {entry.id for entry in catalogue.entries}
    assert {"gsm/train-00000-of-00001.jsonl", "gsm/test-00000-of-00001.jsonl"} <= ids
    assert "gsm" not in ids


def test_rules_and_allowed_reward_services_are_reported(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_REWARD_HOSTS", "judge.internal:8080, judge.example.org")
    told = {(entry.kind, entry.id) for entry in tools.eventually(CatalogueScanner([tmp_path]).unsent)}
    assert {("rule", "letters:score"), ("rule", "math:verify")} <= told
    assert {id for kind, id in told if kind == "reward_host"} == {"judge.internal:8080", "judge.example.org"}
    monkeypatch.setenv("OPPO_ENGINE_COMMAND", "/other/python -m oppo_core")  # its packages are not known here
    assert reward_entries() == []


def test_rules_installed_after_the_start_are_reported(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SCAN_EVERY_S", 0.0)
    monkeypatch.syspath_prepend(packages := tmp_path / "packages")
    packages.mkdir()
    scanner = CatalogueScanner([tmp_path])
    scanner.acknowledge(tools.eventually(scanner.unsent))
    info = packages / "my_rewards-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: my-rewards\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[oppo.rules]\nmine:happy = my_rewards:happy\n")
    assert ("rule", "mine:happy") in {(entry.kind, entry.id) for entry in tools.eventually(scanner.unsent)}
