"""What a training step works on, how it is put together from a spec, and the checks before it starts."""
