"""One of the processes that train the same small runs under every backend: `one_rank.py WORLD RANK`.

WORLD/cases.json lists them; what came of a case is written to WORLD/NAME/rank-RANK.json, and the weights beside it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import math
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor

from oppo_bench.engine.live_bytes import most_weights
from oppo_contract.spec import RunSpec, load_spec
from oppo_core.checkpointing.save_restore import restore, verify
from oppo_core.distributed.process_group import SINGLE, Ranks, Rendezvous, join
from oppo_core.engine import step_report
from oppo_core.engine.build import assemble
from oppo_core.engine.layout import select_device
from oppo_core.engine.state import Engine
from oppo_core.models.protocol import Network
from oppo_core.models.sharded_weights import full
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.reporting.event_log import NODE_EVENTS, Journal
from oppo_core.scoring.sharded import ShardedScorers
from oppo_core.train import train
from oppo_core.training.optimizer import NonFiniteError
from oppo_core.training.zero import MOMENTS, ZeroBackend

LINEAR = torch.nn.functional.linear
Case = dict[str, Any]


def main(world: Path, rank: int) -> None:
    """Every case, one after the other; each has a rendezvous of its own."""
    torch.set_num_threads(1)
    faulthandler.enable()
    for case in json.loads((world / "cases.json").read_text()):
        spec = load_spec(case["spec"])
        nodes = spec.resources.nodes
        if rank < nodes:
            run(
                world,
                case,
                spec,
                SINGLE if nodes == 1 else join(rendezvous_of(world, case, rank, nodes), "engine", select_device(spec)),
            )
            gc.collect()  # process groups end here and not at any moment of the next case


def rendezvous_of(world: Path, case: Case, rank: int, ranks: int) -> Rendezvous:
    """The rendezvous of the ranks, at a port that rank 0 chooses now.

    Ports chosen for all cases beforehand can be equal or taken since; rank 1 then joins an earlier case's store.
    """
    chosen = world / f"{case['name']}.port"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            chosen.with_suffix(".new").write_text(str(probe.getsockname()[1]))
        chosen.with_suffix(".new").rename(chosen)
    deadline = time.monotonic() + 60
    while not chosen.exists():
        assert time.monotonic() < deadline, f"rank 0 has not begun {case['name']}"
        time.sleep(0.01)
    return Rendezvous("127.0.0.1", int(chosen.read_text()), rank, ranks, rank == 0, 60.0)


def run(world: Path, case: Case, spec: RunSpec, ranks: Ranks) -> None:
    """Train, and write the metrics of each step, how it ended, and the weights."""
    out = world / case["name"]
    out.mkdir(exist_ok=True)
    journal = Journal(out / f"events-{ranks.rank}.jsonl", None if ranks.first else NODE_EVENTS)
    resume = checkpoint_at(world / case["resume"]) if case["resume"] else None
    changes = verify(resume, spec, ranks) if resume is not None else []
    engine = assemble(spec, [world], out, journal, 1, resume, ranks)
    if resume is not None:
        restore(engine, resume, changes)
    before = {name: weight.clone() for name, weight in weights(engine).items()}
    fault, chunks = "", itertools.count(1)
    stop = math.inf if case["stop"] is None or ranks.rank != 1 else case["stop"]
    with recorded_metrics() as steps, received_scores() as received, zero_bytes() as held, case_fault(case, ranks):
        try:
            train(engine, lambda: engine.batch is not None and next(chunks) >= stop)
        except NonFiniteError as error:
            fault = str(error)
    read = sharded_reads(engine) if case["read"] else {}
    after = weights(engine)
    moved = max(float((after[name] - weight).abs().max()) for name, weight in before.items())
    save_file({name: weight.clone() for name, weight in after.items()}, out / f"rank-{ranks.rank}.safetensors")
    (out / f"rank-{ranks.rank}.json").write_text(
        json.dumps(
            {
                "steps": steps,
                "fault": fault,
                "moved": moved,
                "kept": kept(engine),
                "received": len(received),
                "read": read,
                "held": held,
            }
        )
    )
    engine.scorers.close()
    if dist.is_initialized() and "deepspeed" not in sys.modules:  # DeepSpeed keeps the group of its first engine
        dist.destroy_process_group()
    assert torch.nn.functional.linear is LINEAR, "the backend has put something in its place, which all networks use"


def checkpoint_at(path: Path) -> Path:
    """The checkpoint `path`, or the newest of the run `path`."""
    checkpoints = path / "checkpoints"
    return max(checkpoints.iterdir()) if checkpoints.is_dir() else path


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """The weights of the network that decodes, and the critic's; whole, in the run's dtype. Collective."""
    critic = engine.scorers.trainer  # type: ignore[attr-defined]
    found = critic.network.state_dict() if critic is not None else {}
    actor = engine.actor.decoding.state_dict()  # type: ignore[attr-defined]
    gathered = {f"critic.{name}": full(w.detach()).to(critic.dtype) for name, w in found.items()}
    return {f"actor.{name}": w.detach() for name, w in actor.items()} | gathered


def sharded_reads(engine: Engine) -> dict[str, dict[str, Any]]:
    """By role: the result of a pass without gradients over a row, and bytes of weights: this rank's own, and most at one time."""
    tokens = torch.arange(3, 23)[None]
    trainers = {"actor": engine.actor, "critic": engine.scorers.trainer}  # type: ignore[attr-defined]
    read = {}
    for role, trainer in trainers.items():

        def compute(network: Network, role: str = role) -> tuple[torch.Tensor]:
            states = network.hidden(tokens, torch.arange(tokens.shape[1])[None])
            return (network.logits(states) if role == "actor" else network.scalar(states),)

        sharded = getattr(trainer.optimizer, "sharded", None)  # type: ignore[attr-defined]
        counts = FSDPMemTracker(sharded._module) if sharded else contextlib.nullcontext()
        with torch.no_grad(), counts as tracker:
            result = trainer.optimizer.forward(compute, trainer.network)[0]  # type: ignore[attr-defined]
        own = sum(part.to_local().nbytes for part in trainer.network.parameters()) if sharded else 0  # type: ignore[attr-defined]
        read[role] = {"result": result.flatten().tolist(), "own": own, "most": most_weights(tracker) if sharded else 0}
    return read


def kept(engine: Engine) -> dict[str, int]:
    """How many of the numbers that each role trains this rank has."""
    trainers = {"actor": engine.actor, "critic": engine.scorers.trainer}  # type: ignore[attr-defined]
    parts = {role: trainer.optimizer.parameters for role, trainer in trainers.items() if trainer is not None}  # type: ignore[attr-defined]
    return {role: sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parts[role]) for role in parts}


@contextlib.contextmanager
def recorded_metrics() -> Iterator[list[dict[str, float]]]:
    """What every step learned, as it is reported."""
    steps: list[dict[str, float]] = []
    plain = step_report.finish_step

    def finish_step(engine: Engine, batch: Any, experience: Any, metrics: dict[str, float], window: Any) -> None:
        steps.append({name: float(value) for name, value in metrics.items() if not name.startswith("perf/")})
        plain(engine, batch, experience, metrics, window)

    with mock.patch.object(step_report, "finish_step", finish_step):
        yield steps


@contextlib.contextmanager
def received_scores() -> Iterator[list[int]]:
    """sequence_ids of the rows that this rank trained with another rank's scores."""
    received: list[int] = []
    plain = ShardedScorers._exchange_rewards

    def exchange(self: ShardedScorers, sequence_ids: list[int]) -> Any:
        received.extend(self._arrived.intersection(sequence_ids))
        return plain(self, sequence_ids)

    with mock.patch.object(ShardedScorers, "_exchange_rewards", exchange):
        yield received


def nested_bytes(tensors: Any) -> int:
    """Of a tensor, of lists of them, or of None."""
    return sum(map(nested_bytes, tensors)) if isinstance(tensors, list) else getattr(tensors, "nbytes", 0)


@contextlib.contextmanager
def zero_bytes() -> Iterator[dict[str, int]]:
    """Bytes that DeepSpeed holds after a backward pass at most, by kind; of the actor and the critic together."""
    held: dict[str, int] = {}
    by_role: dict[int, dict[str, int]] = {}
    plain = ZeroBackend.backward

    def backward(self: ZeroBackend, loss: torch.Tensor) -> None:
        plain(self, loss)
        zero = self._engine.optimizer
        if not hasattr(zero, "all_grad_tensors"):  # DeepSpeed's optimizer of 16-bit weights at stage 1
            return
        gradients = [
            list(zero.all_grad_tensors.values()),
            list(zero.averaged_gradients.values()),
            [p.grad for p in self.parameters],
        ]
        found = {
            "gradients": gradients,
            "moments": [state[name] for state in zero.optimizer.state.values() for name in MOMENTS if name in state],
            "masters": list(zero.single_partition_of_fp32_groups),
        }
        most = by_role.setdefault(id(self), dict.fromkeys(found, 0))
        for kind, tensors in found.items():
            most[kind] = max(most[kind], nested_bytes(tensors))
            held[kind] = sum(role[kind] for role in by_role.values())

    with mock.patch.object(ZeroBackend, "backward", backward):
        yield held


@contextlib.contextmanager
def case_fault(case: Case, ranks: Ranks) -> Iterator[None]:
    """Where the case asks for it, the policy loss of rank 1 is not a number in the step of that number."""
    plain, wanted = ActorTrainer.accumulate, case["fault"]

    def accumulate(self: ActorTrainer, experience: Any, *arguments: Any, **more: Any) -> None:
        if wanted is not None and ranks.rank == 1 and arguments[-1] == wanted:
            experience.advantages.fill_(float("nan"))
        plain(self, experience, *arguments, **more)

    with mock.patch.object(ActorTrainer, "accumulate", accumulate):
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
