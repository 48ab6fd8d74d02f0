"""`python -m oppo_cli` is `oppo`."""

from oppo_cli.main import main

if __name__ == "__main__":
    main()
