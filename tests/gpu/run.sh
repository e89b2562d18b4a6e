#!/usr/bin/env bash
# Runs set-up and all parts of the GPU tests on a node with GPUs, for launch/test.sh --gpu.
# Usage: tests/gpu/run.sh [--minutes N] [--torch-python PYTHON]
# MLPERF_RN50_VARIANT is the variant to set up (default: the current variant of .venv if it is for GPUs, ngc in NVIDIA's
# container, else cu117). One archive is written to the folder MLPERF_RN50_GPU_RESULT (default: logs).
# MLPERF_RN50_TEST_GPU=dry runs all parts on the CPU, to develop them.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
export MLPERF_RN50_TEST_GPU=${MLPERF_RN50_TEST_GPU:-run}

# Prints the reason if the tests cannot run here.
no_gpu() {
    if ! command -v nvidia-smi >/dev/null; then
        echo 'nvidia-smi is missing, so there is no NVIDIA driver'
    elif [[ $(timeout --kill-after 5 60 nvidia-smi -L 2>/dev/null) != GPU\ * ]]; then
        echo 'nvidia-smi lists no GPU'
    fi
}
gpu_variant() {
    local made=''
    [ ! -r .venv/.setup/made ] || IFS=", " read -r made _ <.venv/.setup/made || true
    case $made in
        cu* | ngc) echo "$made" ;;
        *) PATH=/usr/local/bin:/usr/bin:/bin python3 -c \
            'import mxnet, sys; sys.exit(not mxnet.runtime.Features().is_enabled("CUDA"))' 2>/dev/null &&
            echo ngc || echo cu117 ;;
    esac
}
why=$([ "$MLPERF_RN50_TEST_GPU" = dry ] || no_gpu)
if [ -n "$why" ]; then
    echo "launch/test.sh --gpu: no GPU here: $why; nothing was set up or run" >&2
    exit 2
fi
[ "$MLPERF_RN50_TEST_GPU" = dry ] || {
    export MLPERF_RN50_VARIANT=${MLPERF_RN50_VARIANT:-$(gpu_variant)}
    export MLPERF_RN50_EXTRAS=${MLPERF_RN50_EXTRAS-demo,export,pytest} # without linters and other packages for development
}
launch/setup.sh || exit 1 # it may need the container's PYTHONPATH
. launch/engines/program.sh
export PATH="$PWD/.venv/bin:$PATH"
exec python tests/gpu/run_parts.py "$@"
