"""Tensors written in shards by some ranks and read by others equal the whole ones. The ranks are torch's fake process group."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from oppo_core.checkpointing.background import BackgroundWriter
from oppo_core.distributed.process_group import Ranks
from oppo_core.models import shard_files
from oppo_core.models.tensor_files import load_tensors, save_tensors, shards_of_rank
from tests.fakes.fake_process_group import fake_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@contextmanager
def mesh_of(rank: int, world: int) -> Iterator[tuple[Ranks, DeviceMesh]]:
    with fake_ranks(rank, world) as ranks:
        assert dist.group.WORLD is not None
        yield ranks, DeviceMesh.from_group(dist.group.WORLD, "cpu")


def sharded(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    found = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    assert isinstance(found, DTensor)
    return found


def write(tensors: dict[str, Tensor], plain: dict[str, Tensor], path: Path, world: int) -> None:
    for rank in range(world):
        with mesh_of(rank, world) as (ranks, mesh):
            parts = {name: sharded(tensor, mesh) for name, tensor in tensors.items()}
            save_tensors(parts | (plain if rank == 0 else {}), path, ranks)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)
rows = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5)


@given(rows, st.integers(1, 5), st.integers(1, 5))
def test_any_number_of_ranks_reads_what_any_number_wrote(
    rows: list[tuple[list[int], torch.dtype]], wrote: int, reads: int
) -> None:
    """Also where a rank has no row of a tensor, because the tensor has fewer rows than there are ranks."""
    generator = torch.Generator().manual_seed(len(rows))
    tensors: dict[str, Tensor] = {
        f"{n}.exp_avg": torch.randn(*shape, generator=generator).to(dtype) for n, (shape, dtype) in enumerate(rows)
    }
    plain = {"0.step": torch.tensor(3.0), "digest": torch.arange(4, dtype=torch.uint8)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimizer.safetensors"
        write(tensors, plain, path, wrote)
        for rank in range(reads):
            with mesh_of(rank, reads) as (_, mesh):
                like = {name: sharded(torch.zeros_like(tensor), mesh) for name, tensor in tensors.items()} | {
                    "other": torch.zeros(1)
                }
                found = load_tensors(path, like)
                for name, tensor in tensors.items():
                    part = found[name]
                    assert isinstance(part, DTensor)
                    assert torch.equal(part.to_local(), sharded(tensor, mesh).to_local()), name
                assert {name: found[name].tolist() for name in plain} == {name: t.tolist() for name, t in plain.items()}
        whole = load_tensors(path, {})
        assert whole.keys() == tensors.keys() | plain.keys()
        for name, tensor in tensors.items():
            assert whole[name].dtype == tensor.dtype
            assert torch.equal(whole[name], tensor), name


def test_each_rank_writes_its_own_part_in_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "FILE_BYTES", 400)
    tensors = {str(n): torch.full((10, 10), float(n)) for n in range(6)}  # 200 B a rank
    write(tensors, {"step": torch.tensor(1.0)}, tmp_path / "critic.safetensors", 2)
    for rank in range(2):
        files = shards_of_rank(tmp_path, rank)
        assert len(files) == 3
        held = 0
        for file in files:
            with safe_open(file, "pt") as opened:
                held += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
        assert held == 300
    with safe_open(tmp_path / "critic.safetensors", "pt") as opened:
        assert list(opened.keys()) == ["step"]
    found = load_tensors(tmp_path / "critic.safetensors", {})
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_without_shards_there_is_one_file(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(2)}, tmp_path / "critic.safetensors", Ranks())
    assert [path.name for path in tmp_path.iterdir()] == ["critic.safetensors"]
    assert load_tensors(tmp_path / "critic.safetensors", {"a": torch.zeros(2)})["a"].tolist() == [1.0, 1.0]


def test_an_error_of_torch_is_raised_as_what_it_is(tmp_path: Path) -> None:
    """A full disk, say, is recognised by its number; torch's own exception is not even an `Exception`."""
    (tmp_path / "critic.shards").write_text("a file in the folder's place")
    with pytest.raises(OSError, match=r"critic\.shards"):
        write({"a": torch.ones(4)}, {}, tmp_path / "critic.safetensors", 1)


def test_a_background_copy_of_shards_keeps_their_values() -> None:
    with mesh_of(1, 2) as (_, mesh):
        part = sharded(torch.arange(6.0), mesh)
        copies = BackgroundWriter().copy({"a": part, "same": part})
        part.to_local().add_(1)
        for name in ("a", "same"):
            copy = copies[name]
            assert isinstance(copy, DTensor)
            assert copy.to_local().tolist() == [3.0, 4.0, 5.0]
