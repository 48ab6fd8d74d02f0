"""Four 7B models sharded over 8 and 64 GPUs by FSDP2: which overlap pays at which batch size and response length.

The machine is `machines/h200-7b-fsdp2.yaml`. `sequential` and `inter` use all GPUs for every stage. `intra` and `both` stream to
a served reward model on one GPU in eight; reference and critic are sharded over the others, as the engine requires with FSDP2.
"""

from __future__ import annotations

from oppo_contract.spec import RunSpec
from oppo_core.simulation.paper import PAPER_SPEC, Case, paper_spec
from oppo_core.simulation.sensitivity import (
    BACKWARD,
    MFU,
    READING,
    ROUND,
    Changed,
    answering,
    costing,
    having,
    overlapping,
    scaled,
)
from oppo_estimate.devices import Devices, Ranks, load_devices

MACHINE = "h200-7b-fsdp2"
GPUS = (8, 64)
GPUS_PER_REWARD = 8
BATCHES = (112, 256, 1024)
LONGEST = (512, 4096, 16384)  # tokens; the median is an eighth: the same shape
# Simulated steps by batch size: a large batch averages over as many responses in fewer steps.
STEPS = {112: 15, 256: 10, 1024: 6}
SIGMA = 0.9
SENSITIVE_BATCH, SENSITIVE_LONGEST = 112, 4096
LINKS = ("ranks.node_bytes_s", "ranks.network_bytes_s")

# Assumption and how the devices change; all at `SENSITIVE_BATCH` and `SENSITIVE_LONGEST`.
CHANGES: tuple[tuple[str, Changed | None], ...] = (
    ("as assumed", None),
    ("decode step 29 ms (transformers' loop)", costing(29000, ROUND)),
    ("decode step 3.2 ms (memory bandwidth alone)", costing(3200, ROUND)),
    ("length tail: σ 0.5", answering(SENSITIVE_LONGEST / 8, 0.5)),
    ("length tail: σ 1.2", answering(SENSITIVE_LONGEST / 8, 1.2)),
    ("links 4 × as fast", scaled(4, *LINKS)),
    ("links ÷ 4", scaled(1 / 4, *LINKS)),
    ("links ÷ 16", scaled(1 / 16, *LINKS)),
    ("a collective takes 1 ms", costing(1000, "ranks.collective_us")),
    ("no communication", having(ranks=Ranks())),
    ("MFU 0.54", scaled(MFU / 0.54, *READING, *BACKWARD)),
    ("MFU 0.2", scaled(MFU / 0.2, *READING, *BACKWARD)),
)


def table_cases(seed: int = 0) -> list[Case]:
    """Every number of GPUs with every longest response and batch size."""
    return [
        Case(name(gpus, batch, longest), scale_spec(batch, longest, seed), gpu_machine(gpus, longest))
        for gpus in GPUS
        for longest in LONGEST
        for batch in BATCHES
    ]


def sensitivity_cases() -> list[Case]:
    """Every assumption changed alone, on every number of GPUs."""
    spec = scale_spec(SENSITIVE_BATCH, SENSITIVE_LONGEST)
    unchanged: Changed = having()
    return [
        Case(f"{gpus} GPUs: {assumption}", spec, (change or unchanged)(gpu_machine(gpus, SENSITIVE_LONGEST)))
        for gpus in GPUS
        for assumption, change in CHANGES
    ]


def name(gpus: int, batch: int, longest: int) -> str:
    """Name of a case of the table."""
    return f"{gpus} GPUs, B {batch:,}, to {longest:,}"


def gpu_machine(gpus: int, longest: int) -> Devices:
    """`MACHINE` with so many GPUs, one in `GPUS_PER_REWARD` for the reward, and responses of at most `longest` tokens."""
    scoring = gpus // GPUS_PER_REWARD
    devices = having(actor=gpus - scoring, groups={"reward": scoring})(load_devices(MACHINE))
    return answering(longest / 8, SIGMA)(devices)


def scale_spec(batch: int, longest: int, seed: int = 0) -> RunSpec:
    """One epoch, Δ = B ÷ 4, C an eighth of the longest response, FSDP2, and a reward that is served and therefore streamed."""
    overlap = overlapping(chunk={"size": longest // 8}, overcommit={"initial": batch // 4, "max": batch // 4})
    reward = {**PAPER_SPEC["models"]["reward"], "served_by": "vllm"}
    spec = paper_spec(
        ppo={"batch_size": batch, "epochs": 1}, rollout={"max_new_tokens": longest}, models={"reward": reward},
        training={"backend": "fsdp2"}, **overlap,
    )  # fmt: skip
    return spec.model_copy(update={"seed": seed})
