#!/bin/sh
# Prints the first Python on PATH that can make the project's .venv: 3.11 or newer, with venv and ensurepip.
# A command may exist and not run (pyenv's shims), so each candidate is tried, not only looked up.
set -eu
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    # The real interpreter, so that .venv does not depend on a shim.
    exec "$candidate" -c 'import sys; print(sys.executable)'
  fi
done
echo "No Python 3.11 or newer with venv was found on PATH. Install one (Debian, Ubuntu: apt-get install python3 python3-venv)," >&2
echo "or name it: make setup PYTHON=/path/to/python3" >&2
exit 1
