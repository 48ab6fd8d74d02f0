"""Controllers of Δ and C, as deterministic functions of recorded signals and their own state; every decision carries its reason.

Δ follows the slope of the reward (arXiv 2509.25762, §3.2 and Algorithm 1, with a significance test: docs/algorithm.md). C is the
chunk size with the lowest cost per token in interleaved trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from oppo_contract.spec import Chunk, Overcommit

HISTORY = 4  # windows of mean scores from which the noise is estimated
ROUNDING = 1e-12
TRIALS_PER_SIZE = 3
STEPS_PER_TRIAL = 50  # so that trials take at most 2 % of the steps
MAX_CANDIDATES = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """A controller's decision: the value before and after (possibly equal), and the reason."""

    old: int
    new: int
    reason: str


@dataclass(slots=True)
class OvercommitState:
    """State of the Δ controller: the latest mean scores, at most `HISTORY` windows, and the steps since the score last rose."""

    overcommit: int
    means: list[float] = field(default_factory=list)
    steps_without_rise: int = 0


def adjust_overcommit(state: OvercommitState, settings: Overcommit, mean: float) -> Decision:
    """Record a step's mean score and adjust Δ; mutates `state`.

    With the slope s of the last w + 1 mean scores and its standard error SE: s > 2 SE raises Δ; s < −2 SE, or no rise for w
    steps, lowers it.
    """
    old, w = state.overcommit, settings.window
    state.means = [*state.means, mean][-(HISTORY * w + 1) :]
    if settings.controller == "fixed":
        return Decision(old, old, "fixed")
    if len(state.means) <= w:
        return Decision(old, old, f"collecting: {len(state.means)} of {w + 1} steps")
    slope, error = score_slope(state.means, w)
    signal = f"reward slope {slope:+.3g} ± {error:.2g} per step over {w} steps"
    change = settings.step if settings.rule == "additive" else max(1, old // 4)
    state.steps_without_rise = 0 if slope > 2 * error else state.steps_without_rise + 1
    if slope > 2 * error:
        new, reason = min(old + change, settings.max), f"{signal}: rising, defer more"
    elif slope < -2 * error:
        new, reason = max(old - change, settings.min), f"{signal}: falling, defer less"
    elif state.steps_without_rise >= w:
        new, reason = max(old - change, settings.min), f"{signal}: no rise for {state.steps_without_rise} steps, defer less"
    else:
        new, reason = old, f"{signal}: within the noise, hold"
    state.overcommit = new
    return Decision(old, new, reason)


def score_slope(means: list[float], window: int) -> tuple[float, float]:
    """Least-squares slope of the last `window` + 1 mean scores, and its standard error, both per step.

    The noise is modelled as AR(1), because deferral makes neighbouring steps similar. Variance and autocorrelation are those of
    the residuals of a line through all of `means`; the larger variance of these and of the window's residuals counts.
    """
    centred, slope, residuals = _line(means[-(window + 1) :])
    _, _, history = _line(means)
    squares = float(history @ history)
    variance = max(float(residuals @ residuals) / (window - 1), squares / (len(means) - 2))
    steps = np.arange(window + 1)
    correlation = _autocorrelation(history) ** np.abs(np.subtract.outer(steps, steps))
    spread = float(centred @ centred)
    error = math.sqrt(variance * float(centred @ correlation @ centred)) / spread
    # Rounding alone must not look like a slope without noise.
    return slope, max(error, ROUNDING * max(map(abs, means)))


def _line(values: list[float]) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """Centred steps, least-squares slope, and residuals."""
    y: NDArray[np.float64] = np.asarray(values, dtype=np.float64) - float(np.mean(values))
    x: NDArray[np.float64] = np.arange(len(y), dtype=np.float64) - (len(y) - 1) / 2
    slope = float(x @ y / (x @ x))
    return x, slope, y - slope * x


def _autocorrelation(residuals: NDArray[np.float64]) -> float:
    """Lag-1 autocorrelation of a fit's residuals, corrected for the fit's bias (−(2 + 4ρ)/n, Kendall 1954), within 0 to 0.9."""
    squares = float(residuals @ residuals)
    rho = float(residuals[1:] @ residuals[:-1]) / squares if squares else 0.0
    return min(max(rho + (2 + 4 * rho) / len(residuals), 0.0), 0.9)


@dataclass(slots=True)
class ChunkState:
    """State of the C tuner: size in use, sizes still to try, and measured seconds per token by size.

    `explore_at`: step of the next exploration; 0: `chunk.explore_every`. `unchanged`: latest explorations that kept the size.
    """

    size: int
    pending: list[int] = field(default_factory=list)
    measured: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0
    trying: int | None = None
    explore_at: int = 0
    unchanged: int = 0

    @property
    def current(self) -> int:
        """Chunk size of the next step: the one on trial, else the one in use."""
        return self.trying if self.trying is not None else self.size


def adjust_chunk(state: ChunkState, settings: Chunk, longest: int, seconds_per_token: float) -> Decision | None:
    """Record a step's seconds per generated token and choose the next step's C; mutates `state`.

    An exploration tries each candidate three times, interleaved; the lowest median wins. The first begins after `explore_every`
    steps. The next wait is that long again, but at least 50 times the exploration, and doubles each time the size stays.

    Returns:
        A decision at the end of an exploration, else None.
    """
    if settings.controller == "fixed":
        return None
    state.steps += 1
    if state.trying is not None:
        state.measured.setdefault(state.trying, []).append(seconds_per_token)
        state.trying = state.pending.pop(0) if state.pending else None
        return None if state.trying is not None else _conclude(state, settings)
    if state.steps >= (state.explore_at or settings.explore_every):
        state.pending = chunk_candidates(state.size, settings, longest) * TRIALS_PER_SIZE
        state.measured = {}
        state.trying = state.pending.pop(0)
    return None


def chunk_candidates(size: int, settings: Chunk, longest: int) -> list[int]:
    """Sizes to try: configured ones, or at most five powers of two around `size`, from 8 to half the longest answer."""
    if settings.candidates is not None:
        return sorted(settings.candidates)
    powers = [2**k for k in range(3, 17) if 2**k <= max(8, longest // 2)]
    near = sorted(powers, key=lambda p: (abs(p.bit_length() - size.bit_length()), p))[:MAX_CANDIDATES]
    return sorted(near)


def _conclude(state: ChunkState, settings: Chunk) -> Decision:
    old = state.size
    costs = {size: median(times) for size, times in state.measured.items()}
    state.size = min(costs, key=lambda size: (costs[size], size))
    state.unchanged = state.unchanged + 1 if state.size == old else 0
    trials = sum(map(len, state.measured.values()))
    state.explore_at = state.steps + max(settings.explore_every, STEPS_PER_TRIAL * trials) * 2**state.unchanged
    listed = ", ".join(f"{size}: {cost * 1e6:.0f} µs" for size, cost in sorted(costs.items()))
    wait = state.explore_at - state.steps
    return Decision(old, state.size, f"median time per generated token, {listed}; next exploration in {wait} steps")
