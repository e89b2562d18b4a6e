#!/usr/bin/env bash
# Sets up what is missing and runs linters, types and tests; the last lines say what was left out, and why.
# Usage: launch/test.sh [--all | --changed | --ngc | --gpu] [--minutes N] [PYTEST OPTIONS...]
#   without an option: what gives trust within minutes; no root, nothing but launch/setup.sh
#   --all: also what takes longer, real hosts, Slurm, containers and a browser (root; tests/install.sh installs them), and
#          a part once more as on a processor without AVX-512, and as in NVIDIA's container
#   --ngc: of these the last alone: Python 3.10, NumPy 1.22, an older DALI (tests/ngc.sh)
#   --minutes N: with --all, what takes longer is not begun any more after so many minutes; what and how many is said
#   --changed: of the first, what can be reached by the changes that are not committed, or by the last commit
#   --gpu: on a machine with a GPU, and only there: set-up (NVIDIA's container: MLPERF_RN50_VARIANT=ngc, else cu117),
#          doctor, tests/gpu, and a page to send back: gpu_<card>_<date>.json and .md in logs/gpu_<time>
#          (or $MLPERF_RN50_GPU_RESULT)
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
scope=quick
case ${1:-} in
    --help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    --all | --changed | --ngc | --gpu) scope=${1#--}; shift ;;
esac
if [ "${1:-}" = --minutes ]; then
    MLPERF_RN50_TEST_DEADLINE=$(($(date +%s) + 60 * $2))
    export MLPERF_RN50_TEST_DEADLINE
    shift 2
fi
[ "$scope" != ngc ] || exec tests/ngc.sh "$@"
[ "$scope" != gpu ] || exec tests/gpu/run.sh "$@"
launch/setup.sh
launch/lint.sh
export PATH="$PWD/.venv/bin:$PATH"
# A file of tests stays on one worker, as its tests share what takes long to make.
run_tests() {
    pytest --dist loadfile --no-loadscope-reorder "$@"
}
is_late() { # WHAT [SECONDS OF GRACE]
    [ "$(date +%s)" -gt $((${MLPERF_RN50_TEST_DEADLINE:-9999999999} + ${2:-0})) ] &&
        echo "left out: $1, as no time was left for it (--minutes)"
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
        is_late 'the tests in the stand-in of the container' || tests/ngc.sh "$@"
        run_tests --numprocesses "$(($(nproc) + 1))" -m 'slow or cluster or browser' "$@"
        ! is_late 'what is run again as on a processor without AVX-512' 600 || exit 0
        echo 'again, as on a processor without AVX-512:'
        DNNL_MAX_CPU_ISA=AVX2 run_tests --numprocesses "$(nproc)" tests/e2e/test_precision.py tests/e2e/test_bench.py \
            tests/unit/test_{bench,evaluate,pipeline,resnet,trainer}.py ;;
esac
