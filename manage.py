#!/usr/bin/env python3
"""Django's command line, from a checkout. An installed oppo has the same commands behind `oppo manage`."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Run a management command."""
    # platform/ is a source folder, not a package: see tests/contract/test_layout.py.
    sys.path.insert(0, str(Path(__file__).resolve().parent / "platform"))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
