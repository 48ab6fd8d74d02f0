"""The command line: the composition root, the only package that may import all others, lazily."""
