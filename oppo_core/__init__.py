"""The engine: PPO-RLHF whose stages overlap (OPPO, arXiv 2509.25762). `train.py` is the table of contents."""
