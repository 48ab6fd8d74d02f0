"""The overlap for trainers that are not ours."""
