"""`python -m oppo_core`: one run, without the platform. The command line is fixed in docs/interfaces.md."""

from oppo_core.command import main

if __name__ == "__main__":
    raise SystemExit(main())
