"""The command line `oppo`. Composition root: imports all other packages, lazily.

main      table of commands; `oppo --help` imports neither Django nor torch
up, demo  the platform on one machine (`stack` starts and restarts its processes)
train     the engine alone
"""
