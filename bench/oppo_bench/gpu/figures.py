"""Named figures and the table of a race."""

from __future__ import annotations

from statistics import fmean

from oppo_bench.document import Result
from oppo_bench.gpu.cases import ADAPTED, BASE, OVERLAP
from oppo_bench.gpu.check import Finding
from oppo_bench.gpu.floor import Ceilings, floors, model_flops, needs
from oppo_bench.gpu.racing import GB, Race, Step
from oppo_contract.events import IdleCause
from oppo_core.trace.step_trace import IDLE_CAUSES

MS = 1e3
# Names of stages by docs/metrics.md; the actor's forward pass belongs to its update.
SPANS = {
    "decode": ("timing_s/gen",), "score": ("timing_s/score",), "update_actor": ("timing_s/adv", "timing_s/update_actor"),
    "update_critic": ("timing_s/update_critic",),
}  # fmt: skip


def to_results(race: Race, ceilings: Ceilings) -> list[Result]:
    """A cell's figures by name; ratios are computed within each repetition."""
    case, results = race.cell.case, list[Result]()
    base = [us_per_token(block) for block in race.blocks.get(BASE, [])]
    for name, blocks in race.blocks.items():
        given = f"{case}/{name}"
        token = [us_per_token(block) for block in blocks]
        results.append(Result.of(f"{given}/us_per_token", "us", token))
        results.append(Result.of(f"{given}/step_ms", "ms", [MS * fmean(s.seconds for s in block) for block in blocks]))
        # With several heats the base has more repetitions than the others; each heat has its own.
        pairs = zip(base[race.first.get(name, 0) :], token, strict=False)
        results.append(Result.of(f"{given}/speedup", "ratio", [b / own for b, own in pairs]))
        results += _shares(given, blocks) + _driver(given, blocks)
        results += _against_the_floor(given, race, name, ceilings)
        if profiled := race.profiles.get(name):
            results.append(Result.of(f"{given}/kernels", "kernels", [float(profiled.count)]))
            results.append(Result.of(f"{given}/kernel_busy", "share", [profiled.busy]))
    return results


def us_per_token(block: list[Step]) -> float:
    """Microseconds per trained response token."""
    return 1e6 * sum(step.seconds for step in block) / sum(step.trained for step in block)


def _mean(block: list[Step], name: str) -> float:
    return fmean(step.metrics.get(name, 0.0) for step in block)


def _device(block: list[Step]) -> str:
    """The device's name in the metrics."""
    return next(name.removeprefix("bubble/") for name in block[0].metrics if name.startswith("bubble/"))


def _shares(given: str, blocks: list[list[Step]]) -> list[Result]:
    """Busy time and bubble from the spans, idle time by cause, memory."""
    device = _device(blocks[0])
    results = [
        Result.of(f"{given}/busy", "share", [_mean(block, f"busy/{device}") for block in blocks]),
        Result.of(f"{given}/bubble", "share", [_mean(block, f"bubble/{device}") for block in blocks]),
        Result.of(f"{given}/overlap_factor", "ratio", [_mean(block, "overlap_factor") for block in blocks]),
        Result.of(f"{given}/decode_occupancy", "share", [_mean(block, "decode_occupancy") for block in blocks]),
        Result.of(f"{given}/deferred_share", "share", [_mean(block, "oppo/deferred_token_share") for block in blocks]),
    ]
    causes: list[IdleCause] = [c for c in IDLE_CAUSES if any(_mean(block, f"idle_s/{device}/{c}") > 0 for block in blocks)]
    results += [
        Result.of(f"{given}/idle_ms/{c}", "ms", [MS * _mean(block, f"idle_s/{device}/{c}") for block in blocks]) for c in causes
    ]
    peak = [max(step.peak_bytes for step in block) / GB for block in blocks]
    return results + ([Result.of(f"{given}/peak_gb", "GB", peak)] if max(peak) else [])


def _driver(given: str, blocks: list[list[Step]]) -> list[Result]:
    """Metrics of NVML and GPM if available: `nvml/utilization`, `gpm/sm_util` and others."""
    names = sorted({name for block in blocks for step in block for name in step.driver})
    results = []
    for name in names:
        source, _, rest = name.partition("/")
        values = [step.driver[name] for block in blocks for step in block if name in step.driver]
        unit = "GB" if rest.endswith("_gb") else "share"
        results.append(Result.of(f"{given}/{source}/{rest.rpartition('/')[2]}", unit, values))
    return results


def _against_the_floor(given: str, race: Race, name: str, ceilings: Ceilings) -> list[Result]:
    """Utilization of the device's peak rate, the floor of each stage and of the step, and the ratio to it."""
    overlaps = OVERLAP[name]["intra_step"] != "off"
    share = 0.0 if race.load.name in ADAPTED else 1.0
    results: dict[str, list[float]] = {}
    peak = ceilings.stated_flops_per_s or ceilings.flops_per_s
    for block in race.blocks[name]:
        stages = [needs(race.load.size, step.work, share) for step in block]
        least = [floors(stage, ceilings, overlaps) for stage in stages]
        seconds = sum(step.seconds for step in block)
        results.setdefault("mfu", []).append(sum(map(model_flops, stages)) / (seconds * peak))
        results.setdefault("floor/step_ms", []).append(MS * fmean(floor["step"] for floor in least))
        results.setdefault("to_floor", []).append(seconds / sum(floor["step"] for floor in least))
        for stage, spans in SPANS.items():
            taken = fmean(sum(step.metrics.get(span, 0.0) for span in spans) for step in block)
            floor = fmean(floor[stage] for floor in least)
            results.setdefault(f"floor/{stage}_ms", []).append(MS * floor)
            results.setdefault(f"stage/{stage}_ms", []).append(MS * taken)
            results.setdefault(f"to_floor/{stage}", []).append(taken / floor)
    return [Result.of(f"{given}/{key}", _unit(key), values) for key, values in results.items()]


def _unit(key: str) -> str:
    return "ms" if key.endswith("_ms") else "share" if key == "mfu" else "ratio"


COLUMNS = {
    "step_ms": ("ms a step", "{:,.1f}", 1.0), "us_per_token": ("µs a token", "{:,.1f}", 1.0),
    "speedup": ("speed-up", "{:.2f} ×", 1.0),
    "busy": ("busy", "{:.0f} %", 100.0), "bubble": ("bubble", "{:.0f} %", 100.0), "overlap_factor": ("overlap", "{:.2f}", 1.0),
    "decode_occupancy": ("rows", "{:.0f} %", 100.0), "deferred_share": ("deferred", "{:.0f} %", 100.0),
    "peak_gb": ("peak GB", "{:.1f}", 1.0), "mfu": ("MFU", "{:.1f} %", 100.0), "to_floor": ("to floor", "{:.1f} ×", 1.0),
    "gpm/sm_util": ("SM", "{:.0f} %", 100.0), "gpm/dram_util": ("DRAM", "{:.0f} %", 100.0),
    "nvml/utilization": ("NVML", "{:.0f} %", 100.0),
}  # fmt: skip
SPREAD = ("us_per_token", "speedup")


def table(race: Race, results: list[Result]) -> list[str]:
    """One row per variant, medians; time and ratio with minimum and maximum."""
    named = {result.name: result for result in results}
    shown = [key for key in COLUMNS if any(f"{race.cell.case}/{name}/{key}" in named for name in race.blocks)]
    heads = [
        "variant",
        *(head for key in shown for head in ((COLUMNS[key][0], "min–max") if key in SPREAD else (COLUMNS[key][0],))),
    ]
    rows = [heads, *([name, *_cells(f"{race.cell.case}/{name}", shown, named)] for name in race.blocks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]


def _cells(given: str, shown: list[str], named: dict[str, Result]) -> list[str]:
    cells = []
    for key in shown:
        _, shape, scale = COLUMNS[key]
        result = named.get(f"{given}/{key}")
        cells.append(shape.format(scale * result.median) if result else "–")
        if key in SPREAD:
            cells.append("–".join(f"{scale * value:,.2f}" for value in (result.min, result.max)) if result else "–")
    return cells


def stage_lines(race: Race, results: list[Result]) -> list[str]:
    """Duration of each stage relative to its floor, and idle time, one line per variant."""
    named, lines = {result.name: result for result in results}, []
    for name in race.blocks:
        given = f"{race.cell.case}/{name}"
        stages = [
            f"{stage} {named[f'{given}/stage/{stage}_ms'].median:,.1f} ms ({named[f'{given}/to_floor/{stage}'].median:,.1f} ×)"
            for stage in SPANS
        ]
        idle = [f"{r.name.rpartition('/')[2]} {r.median:,.1f}" for r in results if r.name.startswith(f"{given}/idle_ms/")]
        lines.append(f"{name}: {', '.join(stages)}; idle ms: {', '.join(idle) or 'none'}")
    return lines


def findings_as_results(size: str, found: list[Finding]) -> list[Result]:
    """The checks as figures."""
    return [Result.of(f"{size}/check/{finding.name}", "difference", [finding.seen]) for finding in found]
