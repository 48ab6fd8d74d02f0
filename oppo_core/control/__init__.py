"""Controllers of overcommitment Δ and chunk size C, as pure functions of recorded signals."""
