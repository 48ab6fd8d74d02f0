#!/bin/sh
# Makes a virtual environment in $2 with the packages of the file $3 and, beside them, everything that the virtual environment $1 has.
# Further arguments are pip's; its own settings apply.
set -eu
venv=$1
made=$2
pins=$3
shift 3
if ! cmp -s "$pins" "$made/.set-up"; then
  rm -rf "$made"
  "$venv/bin/python" -m venv "$made"
  "$made/bin/python" -m pip install --quiet --no-input --no-compile --disable-pip-version-check -r "$pins" "$@"
  cp "$pins" "$made/.set-up"
fi
# The environment may be older than this checkout's, and shared with other checkouts: OPPO_BESIDE names another folder for a run.
within=$("$made/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
beside=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import os, site; site.addsitedir(os.environ.get("OPPO_BESIDE") or "%s")\n' "$beside" > "$within/beside.pth"
