"""From prompts to answers: the pool of B+Δ sequences, and the decoder that advances them."""
