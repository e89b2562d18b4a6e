#!/usr/bin/env bash
# Sets up what is missing and runs linters, types and tests; the last lines say what was left out, and why.
# Usage: launch/test.sh [--all | --changed] [--minutes N] [PYTEST OPTIONS...]
#   without an option: what gives trust within minutes; no root, nothing but launch/setup.sh
#   --all: also what takes longer, real hosts, Slurm, containers and a browser (root; tests/install.sh installs them), and
#          a part once more as on a processor without AVX-512
#   --minutes N: with --all, tests that take longer are not begun any more after so many minutes; how many is said
#   --changed: of the first, what can be reached by the changes that are not committed, or by the last commit
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
scope=quick
case ${1:-} in
    --help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    --all | --changed) scope=${1#--}; shift ;;
esac
if [ "${1:-}" = --minutes ]; then
    MLPERF_RN50_TEST_DEADLINE=$(($(date +%s) + 60 * $2))
    export MLPERF_RN50_TEST_DEADLINE
    shift 2
fi
launch/setup.sh
launch/lint.sh
export PATH="$PWD/.venv/bin:$PATH"
# A file of tests stays on one worker, as its tests share what takes long to make.
run_tests() {
    pytest --dist loadfile --no-loadscope-reorder "$@"
}
quick=(--numprocesses "$(nproc)" -m 'not slow and not cluster and not browser')
case $scope in
    quick) run_tests "${quick[@]}" "$@" ;;
    changed)
        reached=$(python tests/reach.py)
        [ -n "$reached" ] || { echo 'no test can be reached by the change'; exit 0; }
        mapfile -t reached <<<"$reached"
        run_tests "${quick[@]}" "${reached[@]}" "$@" || [ $? = 5 ] ;; # 5: all of them are left out
    all)
        run_tests "${quick[@]}" "$@" # first: it is what most changes break
        run_tests --numprocesses "$(($(nproc) + 1))" -m 'slow or cluster or browser' "$@"
        echo 'again, as on a processor without AVX-512:'
        DNNL_MAX_CPU_ISA=AVX2 run_tests --numprocesses "$(nproc)" tests/e2e/test_precision.py tests/e2e/test_bench.py \
            tests/unit/test_{bench,evaluate,pipeline,resnet,trainer}.py ;;
esac
