#!/usr/bin/env bash
# Runs ruff, mypy and shellcheck on all files. The rules are in pyproject.toml and setup.cfg.
# Usage: launch/lint.sh
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
ruff check mlperf_rn50 tests benchmarks docs
mypy mlperf_rn50
shellcheck -x launch/*.sh launch/engines/*.sh launch/*.sbatch benchmarks/*.sh tests/*.sh tests/gpu/*.sh .ci/run
