"""Controllers of Δ and C, and the conditions that end a run; pure functions of recorded signals."""
