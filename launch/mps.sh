#!/usr/bin/env bash
# Starts or stops NVIDIA's Multi-Process Service on this node, for several ranks per GPU.
# Usage: launch/mps.sh start|stop     launch/bind.sh and the launchers call it for --ranks-per-device above 1
# Without a GPU there is nothing to start: ranks then share a core set.

set -euo pipefail
export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mlperf_rn50-mps-$(id -u)}
export CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-$CUDA_MPS_PIPE_DIRECTORY/log}
nvidia-smi -L >/dev/null 2>&1 || exit 0
if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "launch/mps.sh: nvidia-cuda-mps-control is missing on $(hostname); it comes with the driver, or use --ranks-per-device 1" >&2
    exit 2
fi
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
case ${1:-} in
    start) # every rank of a node asks; the first one starts it
        exec 9>"$CUDA_MPS_PIPE_DIRECTORY/lock"
        flock 9
        echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1 || nvidia-cuda-mps-control -d 9>&- ;;
    stop) echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true ;;
    *) sed -n '2,3s/^# //p' "$0" >&2; exit 2 ;;
esac
