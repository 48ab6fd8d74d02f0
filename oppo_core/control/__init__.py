"""Controllers of Δ and C, stop conditions, and the run's score: pure functions of recorded signals."""
