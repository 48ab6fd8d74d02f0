#!/bin/sh
# Makes an environment in $2 that has TRL and, beside it, everything that the virtual environment $1 has. pip's own settings apply.
set -eu
venv=$1
made=$2
pins=requirements/trl.txt
cmp -s "$pins" "$made/.set-up" && exit 0
rm -rf "$made"
"$venv/bin/python" -m venv "$made"
within=$("$made/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
beside=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir("%s")\n' "$beside" > "$within/beside.pth"
"$made/bin/python" -m pip install --quiet --no-input --no-compile --disable-pip-version-check -r "$pins" -c requirements/cpu.lock.txt
cp "$pins" "$made/.set-up"
