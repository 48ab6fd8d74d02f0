#!/bin/sh
# Makes or refreshes the virtual environment named by the first argument. `make setup` runs it when a pinned version changed.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, pip.conf, …) apply as usual.
set -eu
venv=$1
say() { printf '%s\n' "setup: $*"; }

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  python=$(sh scripts/find_python.sh)
  say "creating $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
# Bytecode is written when a module is first imported; compiling all of torch beforehand only costs time.
install() {
  "$venv/bin/python" -m pip install --quiet --no-input --no-compile --disable-pip-version-check --no-warn-script-location "$@"
}

say "installing torch (the largest download)"
install -r requirements/torch.txt -c requirements/cpu.lock.txt
say "installing everything else"
install -r requirements/cpu.lock.txt
install --no-deps --no-build-isolation -e .
# `make deepspeed` leaves ninja out on purpose (requirements/deepspeed.txt).
problems=$("$venv/bin/python" -m pip check --disable-pip-version-check | grep -v -e '^deepspeed .* requires ninja' -e '^No broken') || true
[ -z "$problems" ] || { say "$problems"; exit 1; }
say "ready"
