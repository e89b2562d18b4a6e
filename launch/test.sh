#!/usr/bin/env bash
# Sets up the environment and runs linters, type checks and tests. Each call of pytest reports the tests it left out.
# The last line of the output states time and memory.
# Usage: launch/test.sh [--all | --ngc] [PYTEST OPTIONS...]
#        launch/test.sh --gpu [--minutes N] [--torch-python PYTHON]
#   without an option: quick tests; they need only launch/setup.sh, and no root
#   --all: additionally slow tests, real hosts, Slurm, containers and a browser (root; tests/install.sh installs them),
#          the quick tests again as on the other kind of processor and as another user with one core (tests/matrix.sh),
#          some tests in NVIDIA's container, and a dry run of --gpu on the CPU
#   --ngc: only the tests in a stand-in for NVIDIA's container: Python 3.10, NumPy 1.22, an older DALI (tests/ngc.sh)
#   --gpu: only on a machine with a GPU: set-up (MLPERF_RN50_VARIANT=ngc in NVIDIA's container, else cu117), then doctor,
#          measurements and tests/gpu, the most valuable first, for at most 12 minutes (--minutes N). At the end and after
#          Ctrl-C, one archive to send back is in logs (or $MLPERF_RN50_GPU_RESULT), gpu_<card>_<time>.tar.gz;
#          --torch-python names a Python with PyTorch, with which training steps are compared
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/help.sh"
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
scope=quick
case ${1:-} in
    --all | --ngc | --gpu) scope=${1#--}; shift ;;
esac
[ "$scope" != ngc ] || exec tests/ngc.sh "$@"
[ "$scope" != gpu ] || exec tests/gpu/run.sh "$@"
. launch/engines/program.sh
launch/setup.sh
launch/lint.sh
export PATH="$PWD/.venv/bin:$PATH"
MLPERF_RN50_PEAKS=$(mktemp) # each call of pytest adds the memory of its largest worker, in GB
export MLPERF_RN50_PEAKS
trap 'printf "total time %d:%02d, largest worker %s GB\n" $((SECONDS / 60)) $((SECONDS % 60)) \
    "$(LC_ALL=C sort -n "$MLPERF_RN50_PEAKS" | tail -n 1)"; rm -f "$MLPERF_RN50_PEAKS"' EXIT
failed=0 machine=() # a command that runs another one
# A file stays on one worker, because its tests share slow fixtures. Exit code 5 means that no test was selected.
run_tests() {
    "${machine[@]}" pytest --dist loadfile --no-loadscope-reorder "$@" || [ $? = 5 ] || failed=1
}
# Files that use MXNet, DALI or Horovod run in a separate call, so that the other workers stay small.
run_quick_tests() {
    local packages
    for packages in light training; do
        run_tests --packages "$packages" --numprocesses "$("${machine[@]}" nproc)" \
            -m 'not slow and not cluster and not browser' "$@"
    done
}
run_quick_tests "$@"
if [ "$scope" = all ]; then
    tests/ngc.sh || failed=1
    run_tests --numprocesses "$(($(nproc) + 1))" -m 'slow or cluster or browser' "$@"
    for kind in processor user; do
        machine=(tests/matrix.sh "$kind")
        echo "the quick tests again, with ${machine[*]}:"
        run_quick_tests "$@"
    done
fi
exit "$failed"
