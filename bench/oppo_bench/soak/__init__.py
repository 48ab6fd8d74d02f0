"""`python bench/soak.py`: the whole platform under load for hours, and what of it grows."""
