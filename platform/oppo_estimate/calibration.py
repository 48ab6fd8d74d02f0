"""Earlier runs of the same actor on the same kind of device: what they measured scales the estimates of time and memory.

Pure functions. Which runs count depends on a run's kind (`KIND`) and not on its sizes, so that with the same earlier runs more
rollouts or longer responses never reduce an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import median

from oppo_contract.spec import RunSpec
from oppo_estimate.device_memory import Host, planned_devices
from oppo_estimate.device_speed import Speed
from oppo_estimate.response_lengths import NEVER, Endings, fit_endings
from oppo_estimate.schedules import PLAIN
from oppo_estimate.shapes import Shape
from oppo_estimate.step_time import Lengths, Stages, stages

MOST_RUNS = 10
# Settings that change which work a step does. Sizes (rows, lengths, mini-batches) are in `stages`.
KIND = (
    "overlap.intra_step", "overlap.inter_step", "overlap.update_overlap", "ppo.algorithm", "models.critic", "models.reward",
    "models.reference", "models.lora", "resources.dtype", "resources.devices", "resources.nodes", "resources.processes",
    "resources.cpu_threads", "resources.decoding_devices", "resources.scoring_devices", "rollout.backend", "training.backend",
    "training.recompute", "training.packing", "data.prompts",
)  # fmt: skip
# Of a GPU that is in no table: runs scale it, so that only its proportions matter.
UNKNOWN_GPU = Speed(flops=1e14, decode_flops=2.5e14, bandwidth=2e12, layer_s=1e-3)
LEAST_MEMORY = 0.2  # of the estimate above the fixed part, however little an earlier run took


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """What a run measured: means over its steps; tokens per response and prompt, and peak memory of its fullest device in bytes.

    None: not measured. `cores`: of its node. `clipped`: share of responses that reached the limit. `saved`: time that overlap
    saved ÷ its time, on its recorded steps.
    """

    run_id: int
    spec: RunSpec
    cores: int
    step_s: float
    decode_s: float | None
    response: float
    prompt: float | None
    clipped: float | None = None
    peak_bytes: int | None = None
    saved: float | None = None

    @property
    def endings(self) -> Endings:
        """How its responses ended."""
        return fit_endings(self.response, self.clipped, self.spec.rollout.max_new_tokens)


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """What the estimates need besides the spec: shapes by role, the device, and its speed (None: unknown)."""

    shapes: Mapping[str, Shape]
    host: Host
    speed: Speed | None
    transformers: bool


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Estimated seconds of a step, the same without overlap, and tokens of an average response. `runs`: those that scaled it."""

    step_s: float
    sequential_s: float
    response: float
    runs: tuple[int, ...]


def comparable(spec: RunSpec, runs: Sequence[EarlierRun]) -> list[EarlierRun]:
    """The newest of the runs whose kind differs from the spec's in the fewest settings. `runs`: the newest first."""
    differences = {run.run_id: sum(_setting(spec, path) != _setting(run.spec, path) for path in KIND) for run in runs}
    fewest = min(differences.values(), default=0)
    return [run for run in runs if differences[run.run_id] == fewest][:MOST_RUNS]


def _setting(spec: RunSpec, path: str) -> object:
    return reduce(getattr, path.split("."), spec)


def estimate_step(spec: RunSpec, model: EstimateInputs, runs: Sequence[EarlierRun]) -> StepEstimate | None:
    """The step of `spec`, scaled to comparable `runs` if there are any; None for a device of unknown speed without runs.

    Without runs every response is expected to have the maximum length.
    """
    speed = model.speed or (UNKNOWN_GPU if runs else None)
    if speed is None:
        return None
    lengths = expected_lengths(spec, runs)
    factors = [_factors(run, model, speed) for run in runs]
    decode, rest = (median(column) for column in zip(*factors, strict=True)) if factors else (1.0, 1.0)
    host, sequential = model.host, _sequential(spec)
    planned, without = (stages(each, model.shapes, speed, lengths, host.cores, host.gpu) for each in (spec, sequential))
    used = tuple(run.run_id for run in runs)
    return StepEstimate(planned.step_s(decode, rest), without.step_s(decode, rest), lengths.response, used)


def _sequential(spec: RunSpec) -> RunSpec:
    """The spec without overlap, not validated again: other settings only matter with it."""
    overcommit = spec.overlap.overcommit.model_copy(update={"initial": 0, "max": 0})
    return spec.model_copy(update={"overlap": spec.overlap.model_copy(update={**PLAIN, "overcommit": overcommit})})


def expected_lengths(spec: RunSpec, runs: Sequence[EarlierRun]) -> Lengths:
    """Prompts as long as in the runs, and responses that end as theirs did, under the spec's limits."""
    longest, most = spec.rollout.max_new_tokens, spec.rollout.max_prompt_tokens
    if not runs:
        return Lengths(most, NEVER, longest)
    found = [run.endings for run in runs]
    endings = Endings(median(each.endless for each in found), median(each.rate for each in found))
    prompts = [run.prompt for run in runs if run.prompt is not None]
    return Lengths(min(most, median(prompts)) if prompts else most, endings, longest)


def _factors(run: EarlierRun, model: EstimateInputs, speed: Speed) -> tuple[float, float]:
    """Measured ÷ estimated time of decoding, and of everything else."""
    rollout = run.spec.rollout
    lengths = Lengths(rollout.max_prompt_tokens if run.prompt is None else run.prompt, run.endings, rollout.max_new_tokens)
    estimated = stages(run.spec, model.shapes, speed, lengths, run.cores, model.host.gpu)
    if run.decode_s is None or not 0 < run.decode_s < run.step_s:
        return (run.step_s / estimated.step_s(),) * 2
    return run.decode_s / estimated.decode, _rest_factor(estimated, run.step_s, run.decode_s)


def _rest_factor(estimated: Stages, step_s: float, decode_s: float) -> float:
    """The factor with which the stages besides decoding fill the rest of a measured step."""
    after = estimated.update + estimated.other
    factor = (step_s - decode_s) / after
    if estimated.streamed and factor * estimated.score <= decode_s:
        return factor
    return (step_s if estimated.streamed else step_s - decode_s) / (estimated.score + after)


def expected_peak(spec: RunSpec, model: EstimateInputs, runs: Sequence[EarlierRun]) -> int | None:
    """Expected peak memory of the fullest device, bytes: the median of what each run suggests; None without any.

    The estimate alone assumes that all responses have the maximum length.
    """
    needed, fixed = _fullest(spec, model, model.host.cores)
    peaks = [_scaled_peak(run, run.peak_bytes, model, needed, fixed) for run in runs if run.peak_bytes is not None]
    return int(median(peaks)) if peaks else None


def _scaled_peak(run: EarlierRun, peak: int, model: EstimateInputs, needed: int, fixed: int) -> float:
    """`needed` as a run's measured `peak` suggests: plus what exceeded its estimate, such as larger libraries, or scaled down."""
    estimated, base = _fullest(run.spec, model, run.cores)
    if peak >= estimated:
        return needed + peak - estimated
    return fixed + max(LEAST_MEMORY, (peak - base) / (estimated - base)) * (needed - fixed)


def _fullest(spec: RunSpec, model: EstimateInputs, cores: int) -> tuple[int, int]:
    """Estimated memory of the fullest device, and its fixed part, bytes."""
    host = Host(model.host.memory, cores, model.host.gpu)
    devices = planned_devices(spec, model.shapes, host, model.transformers)
    return max((device.needed, device.fixed) for device in devices)
