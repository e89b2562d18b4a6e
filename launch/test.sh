#!/usr/bin/env bash
# Sets up what is missing and runs linters, types and tests; the last lines say what was left out, and why.
# Usage: launch/test.sh [--all | --changed] [PYTEST OPTIONS...]
#   without an option: what gives trust within minutes; no root, nothing but launch/setup.sh
#   --all: also what takes long, real hosts, Slurm, containers and a browser (root; tests/install.sh installs them), and
#          a part once more as on a processor without AVX-512
#   --changed: what a change since the last such run can reach
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scope=${1:-}
case $scope in
    --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --all | --changed) shift ;;
    *) scope=quick ;;
esac
launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
# ruff does not read setup.cfg.
ruff check --line-length 120 --target-version py311 --select E,F,W,I,B,UP,S301,S307,S602,S605 --ignore B905 mlperf_rn50 tests benchmarks
mypy mlperf_rn50
shellcheck -x launch/*.sh launch/*.sbatch benchmarks/setup.sh tests/install.sh .ci/run
quick=(-m 'not slow and not cluster and not browser' --numprocesses "$(nproc)")
case $scope in
    quick) exec pytest "${quick[@]}" "$@" ;;
    --changed) exec pytest "${quick[@]}" --testmon "$@" ;;
esac
# Much of it waits for other programs: a worker more than there are cores.
pytest --numprocesses $(($(nproc) + 1)) --dist loadgroup "$@"
echo 'again, as on a processor without AVX-512:'
DNNL_MAX_CPU_ISA=AVX2 pytest -m 'not slow' --numprocesses "$(nproc)" tests/e2e/test_precision.py tests/e2e/test_bench.py \
    tests/unit/test_{bench,trainer,resnet,pipeline,evaluate}.py
