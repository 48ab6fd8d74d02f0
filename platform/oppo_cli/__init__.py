"""The command line `oppo`: the composition root, the only package that may import all others, and it does so lazily.

    main      which command lives where; `oppo --help` imports neither Django nor torch
    up, demo  the whole platform on one machine (`stack` starts and restarts its processes)
    train     the engine alone

Exit status: 0 it worked, 1 it failed, 2 the command line or the spec was refused.
"""
