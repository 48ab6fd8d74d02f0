"""Scorers: reward, reference and critic prefill answers while they are decoded, in this process, a thread or a child process."""
