#!/usr/bin/env bash
# Installs PyTorch in benchmarks/.venv, for compare.py.
# Usage: benchmarks/setup.sh
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
launch/setup.sh
packages=(torch==2.13.0 setuptools numpy)
done=benchmarks/.venv/.done_$(printf '%s\n' "${packages[@]}" | sha256sum | cut -c1-16)
if [ ! -e "$done" ]; then
    python3.11 -m venv --clear benchmarks/.venv
    benchmarks/.venv/bin/python -m pip install -q --disable-pip-version-check "${packages[@]}"
    touch "$done"
fi
