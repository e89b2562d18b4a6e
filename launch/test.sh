#!/usr/bin/env bash
# Sets up what is missing and runs the whole test suite: linters, types, tests.
# Usage: launch/test.sh [PYTEST OPTIONS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
# ruff does not read setup.cfg.
ruff check --line-length 120 --target-version py311 --select E,F,W,I,B,UP,S301,S307,S602,S605 --ignore B905 mlperf_rn50 tests benchmarks
mypy mlperf_rn50
shellcheck -x launch/*.sh launch/*.sbatch benchmarks/setup.sh tests/install.sh .ci/run
pytest "$@"
