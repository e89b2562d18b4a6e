#!/usr/bin/env bash
# Runs set-up, doctor and GPU tests on a node with GPUs, for launch/test.sh --gpu.
# Usage: tests/gpu/run.sh [PYTEST OPTIONS...]
# MLPERF_RN50_VARIANT is the variant to set up (default: the current variant of .venv if it is for GPUs, ngc in NVIDIA's
# container, else cu117). The doctor report and a junit report per file are written to MLPERF_RN50_GPU_RESULT (default:
# logs/gpu_<time>). MLPERF_RN50_TEST_GPU=dry runs the tests on the CPU, to develop them.
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
    [ ! -r .venv/.setup/made ] || read -r made _ <.venv/.setup/made || true
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
# Without this check, every test would fail with "no kernel image is available".
too_new() {
    local name capability
    while IFS=, read -r name capability; do
        ! [[ $capability =~ ^\ *(9|[1-9][0-9])\.[0-9]+ ]] || { echo "$name"; return; }
    done < <(timeout 60 nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null)
}
device=(--train.device cpu --train.precision float32 --train.local_batch_size 8)
[ "$MLPERF_RN50_TEST_GPU" = dry ] || {
    export MLPERF_RN50_VARIANT=${MLPERF_RN50_VARIANT:-$(gpu_variant)}
    export MLPERF_RN50_EXTRAS=${MLPERF_RN50_EXTRAS-demo,pytest} # without linters and other packages for development
    device=()
    card=$([[ $MLPERF_RN50_VARIANT != cu* ]] || too_new)
    if [ -n "$card" ]; then
        echo "launch/test.sh --gpu: $card: the MXNet of $MLPERF_RN50_VARIANT has no code for it; run this in NVIDIA's MXNet \
container, such as nvcr.io/nvidia/mxnet:24.06-py3 (docs/gpu.md); nothing was set up or run" >&2
        exit 2
    fi
}
launch/setup.sh || exit 1
export PATH="$PWD/.venv/bin:$PATH"
out=${MLPERF_RN50_GPU_RESULT:-logs/gpu_$(date -u +%Y%m%dT%H%M%SZ)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export MLPERF_RN50_GPU_RESULT=$out
[ -z "$(ls -A "$out")" ] || { echo "launch/test.sh --gpu: $out is not empty; choose a different folder" >&2; exit 2; }

failed=0
python -m mlperf_rn50 doctor --config tests/gpu/resnet50.yaml --run.dir "$out/doctor" "${device[@]}" --format json \
    >"$out/doctor.json" 2>"$out/doctor.txt" || { failed=1; cat "$out/doctor.txt" >&2; }
# Each file has a separate process, so that its GPU memory or a crash does not affect other files. It runs in the
# foreground, so that Ctrl-C also reaches pytest.
trap 'exit 130' INT
for file in tests/gpu/test_*.py; do
    timeout --foreground --signal INT --kill-after 60 3600 python -m pytest "$file" --junitxml "$out/$(basename "$file" .py).xml" "$@" || { [ $? = 5 ] || failed=1; }
done
echo "to send back: $out"
exit $failed
