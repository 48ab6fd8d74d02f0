"""The lay-outs of the OPPO paper (arXiv 2509.25762) on virtual devices, with its published figures for comparison.

Nothing is fitted to the paper: costs are in `machines/paper-*.yaml`, the workload is assumed (docs/simulation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oppo_contract.spec import RunSpec, load_spec
from oppo_core.simulation.plan import Progress, no_progress, plan
from oppo_estimate.devices import Devices, load_devices
from oppo_estimate.schedules import Row, Target, with_speedups

LAYOUTS = ("paper-h200-7b", "paper-h200-3b", "paper-gh200-3b", "paper-a100-7b")
OVERLAPPED = ("intra", "inter", "both")
# TRL's PPOTrainer: four epochs, one optimizer step each. Δ = B ÷ 4; the paper's moves between bounds that are not public.
PAPER_SPEC: dict[str, Any] = {
    "name": "paper", "steps": 1000, "data": {"prompts": "none"},
    "models": {"actor": {"path": "none"}, "reward": {"model": {"path": "none"}}},
    "ppo": {"batch_size": 112, "epochs": 4, "micro_batch_tokens": 16384},
    "rollout": {"max_new_tokens": 4096, "max_prompt_tokens": 256},
    "overlap": {
        "chunk": {"size": 500, "controller": "fixed"}, "max_age": 2,
        "overcommit": {"controller": "fixed", "initial": 28, "min": 0, "max": 28},
    },
}  # fmt: skip
# A driver's "utilization" counts the time in which any kernel runs, and decoding from Python leaves gaps between kernels.
# Measured in transformers' generation: 0.76 (its authors, 8B) and 0.37 (a TRL user, 1.4B, A100s); docs/simulation.md.
KERNELS_IN_DECODE = (0.76, 0.37)


@dataclass(frozen=True, slots=True)
class Case:
    """A lay-out with its assumptions. `baseline` replaces the devices of the sequential run where they differ."""

    name: str
    spec: RunSpec
    devices: Devices
    baseline: Devices | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A published figure: its name, range and unit, the simulated counterpart, and a remark on the difference.

    `comparable`: whether the simulation has a basis for an absolute figure.
    """

    what: str
    low: float
    high: float
    unit: str
    simulated: Callable[[Case, Mapping[str, Row]], float]
    remark: str
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim and its simulated range over the lay-outs."""

    claim: Claim
    low: float
    high: float

    @property
    def explained(self) -> str:
        """Whether the simulated range is within the paper's, outside, or overlaps it."""
        if not self.claim.comparable:
            return "not comparable"
        if self.high < self.claim.low:
            return "no: too low"
        if self.low > self.claim.high:
            return "no: too high"
        return "yes" if self.claim.low <= self.low and self.high <= self.claim.high else "in part"

    def as_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        paper = [self.claim.low, self.claim.high]
        return {
            "figure": self.claim.what, "unit": self.claim.unit, "paper": paper, "simulated": [self.low, self.high],
            "explained": self.explained, "remark": self.claim.remark,
        }  # fmt: skip


def paper_spec(**changes: Mapping[str, Any]) -> RunSpec:
    """The paper's run; `changes` by section, merged one level deep."""
    tree = PAPER_SPEC | {name: PAPER_SPEC.get(name, {}) | dict(section) for name, section in changes.items()}
    return load_spec(tree)


def layouts() -> list[Case]:
    """Every lay-out with the default assumptions."""
    return [Case(name, paper_spec(), load_devices(name)) for name in LAYOUTS]


def simulate_case(case: Case, steps: int, on_step: Progress = no_progress) -> dict[str, Row]:
    """Rows by schedule: sequential, intra, inter, both."""
    target = Target(case.spec.steps)

    def progress(schedule: str, step: int) -> None:
        on_step(f"{case.name}, {schedule}", step)

    rows = plan(case.spec, case.baseline or case.devices, target, steps, schedules=("sequential",), progress=progress)
    rows += plan(case.spec, case.devices, target, steps, schedules=OVERLAPPED, progress=progress)
    return {row.schedule: row for row in with_speedups(rows)}


def utilization(row: Row, case: Case, kernels: float) -> float:
    """Mean over the devices, with decoding counted as busy for the share `kernels` of its time."""
    decoding = row.decode_share * case.devices.actor / len(case.devices.names)
    return row.utilization - (1 - kernels) * decoding


def verdicts(results: list[tuple[Case, dict[str, Row]]]) -> list[Verdict]:
    """Every published figure with its simulated range over the lay-outs."""
    compared = []
    for claim in CLAIMS:
        values = [claim.simulated(case, rows) for case, rows in results]
        compared.append(Verdict(claim, min(values), max(values)))
    return compared


def _used(schedule: str, kernels: float) -> Callable[[Case, Mapping[str, Row]], float]:
    return lambda case, rows: 100 * utilization(rows[schedule], case, kernels)


def _gained(kernels: float) -> Callable[[Case, Mapping[str, Row]], float]:
    return lambda case, rows: utilization(rows["both"], case, kernels) / utilization(rows["sequential"], case, kernels)


HIGH, LOW = KERNELS_IN_DECODE
CLAIMS = (
    Claim("speed-up, intra only", 1.2, 1.3, "×", lambda case, rows: rows["intra"].speedup,
          "only the reward's prefill is hidden; the paper's gain needs scoring two to three times as slow"),
    Claim("speed-up, inter only", 1.6, 2.06, "×", lambda case, rows: rows["inter"].speedup,
          "decode steps of the tail are saved: the gain grows with the cost of a decode step relative to the update"),
    Claim("speed-up, both", 1.8, 2.8, "×", lambda case, rows: rows["both"].speedup, "about the product of the two"),
    Claim("time to reward, 4,300 min sequential", 2300, 2300, "min", lambda case, rows: 4300 / rows["both"].speedup,
          "the lay-out is not public; equal steps to the target are assumed"),
    Claim("time to reward, 13,000 min sequential", 5200, 5200, "min", lambda case, rows: 13000 / rows["both"].speedup,
          "likewise"),
    Claim("time per step, both", 99.84, 99.84, "s", lambda case, rows: rows["both"].step_s,
          "the paper's lengths are not public, so absolute times are not comparable", comparable=False),
    Claim("steps a deferred answer waits", 1.0, 1.1, "", lambda case, rows: rows["both"].deferred_age,
          "“almost all by one step”: its tail must be shorter, or its steps longer"),
    Claim("utilization, sequential, busy", 35.7, 50.6, "%", _used("sequential", 1.0),
          "busy as defined here, all of decoding: another quantity"),
    Claim(f"utilization, sequential, decode at {100 * LOW:.0f} %", 35.7, 50.6, "%", _used("sequential", LOW),
          "as a driver counts it, by a TRL user's measurement"),
    Claim(f"utilization, sequential, decode at {100 * HIGH:.0f} %", 35.7, 50.6, "%", _used("sequential", HIGH),
          "the same, by transformers' authors'"),
    Claim("utilization, both, busy", 67.3, 74.1, "%", _used("both", 1.0), "another quantity"),
    Claim(f"utilization, both, decode at {100 * LOW:.0f} %", 67.3, 74.1, "%", _used("both", LOW), ""),
    Claim(f"utilization, both, decode at {100 * HIGH:.0f} %", 67.3, 74.1, "%", _used("both", HIGH), ""),
    Claim(f"utilization, both ÷ sequential, decode at {100 * LOW:.0f} %", 1.40, 2.08, "×", _gained(LOW),
          "overlap also saves padded work, which counts as utilization"),
)  # fmt: skip
