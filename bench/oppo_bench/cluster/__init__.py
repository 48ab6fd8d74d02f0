"""The cluster simulator: the scheduling policy, FIFO, and FIFO + EASY backfill on one trace of submissions.

`read_trace` and `synthesize` give a trace, `simulate` runs it under one planner in virtual time, `compute_figures` summarizes the
outcome.
Results are in docs/scheduling.md. No Django, no database, no clock: equal traces and settings give equal outcomes.
"""

from oppo_bench.cluster.baselines import easy, fifo
from oppo_bench.cluster.figures import Figures, Spread, compute_figures
from oppo_bench.cluster.simulation import Conduct, Hold, Outcome, Planner, Wait, simulate
from oppo_bench.cluster.synthetic_trace import SHAPES, Recipe, synthesize
from oppo_bench.cluster.trace import Cluster, PoolOfNodes, Submission, TeamInTrace, Trace, TraceError, read_trace

__all__ = [
    "SHAPES",
    "Cluster",
    "Conduct",
    "Figures",
    "Hold",
    "Outcome",
    "Planner",
    "PoolOfNodes",
    "Recipe",
    "Spread",
    "Submission",
    "TeamInTrace",
    "Trace",
    "TraceError",
    "Wait",
    "compute_figures",
    "easy",
    "fifo",
    "read_trace",
    "simulate",
    "synthesize",
]
