"""Lengths of responses under another limit than the one they were measured with.

Symbols: L longest response, r rate per token, p share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class Endings:
    """How responses end: a share `endless` only at the limit, the others at this rate per token, a constant."""

    endless: float
    rate: float

    def mean(self, longest: int) -> float:
        """Mean length, p L + (1 − p) (1 − e^(−rL)) ÷ r, of responses that are cut at L = `longest`."""
        return self.endless * longest + (1 - self.endless) * _mean_of_ending(self.rate, longest)

    def rounds(self, rows: int, extra: int, longest: int) -> float:
        """Expected tokens until `rows` of `rows` + `extra` responses have ended.

        Of m responses that end by themselves the n-th ends after (H(m) − H(m − n)) ÷ r.
        """
        ending = (rows + extra) * (1 - self.endless)
        if self.rate <= 0 or rows >= ending * (1 + 1e-12):
            return longest
        return min(longest, (_harmonic(ending) - _harmonic(max(0.0, ending - rows))) / self.rate)


NEVER = Endings(endless=1.0, rate=0.0)


def fit_endings(mean: float, clipped: float | None, longest: int) -> Endings:
    """Those with this mean length, and this share of responses that were cut at `longest`, if it is known.

    A share below that of a constant rate has no `endless` responses.
    """
    if mean >= longest * (1 - 1e-6):
        return NEVER
    low, high = 0.0, min(clipped or 0.0, mean / longest)
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        rate = _rate(mean, share, longest)
        low, high = (share, high) if share + (1 - share) * math.exp(-rate * longest) < (clipped or 0.0) else (low, share)
    return Endings(low, _rate(mean, low, longest))


def _rate(mean: float, endless: float, longest: int) -> float:
    """The rate with which a mean of all responses is reached."""
    of_others = max(1e-3, (mean - endless * longest) / (1 - endless))
    low, high = 0.0, 1.0 / of_others
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        low, high = (rate, high) if _mean_of_ending(rate, longest) > of_others else (low, rate)
    return high


def _mean_of_ending(rate: float, longest: int) -> float:
    return float(longest) if rate * longest < 1e-9 else -math.expm1(-rate * longest) / rate


def _harmonic(n: float) -> float:
    """1 + 1/2 + … + 1/n, continued to real n ≥ 0 by Γ'/Γ and its asymptotic series."""
    less = 0.0
    while n < 8:
        n += 1
        less += 1 / n
    return math.log(n) + 0.5772156649015329 + 1 / (2 * n) - 1 / (12 * n * n) - less
