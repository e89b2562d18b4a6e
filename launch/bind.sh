#!/usr/bin/env bash
# Binds a rank to cores of one NUMA node and the nearest GPU, sets OMP_NUM_THREADS, and prints the binding.
# Usage: launch/bind.sh PROGRAM [ARGUMENTS...]     all launchers start their ranks with this script
# MLPERF_RN50_BIND=off disables binding. An existing OMP_NUM_THREADS is kept.
# SIGUSR1, the stop request, is blocked until the program unblocks it.
set -euo pipefail
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# Create the folder for Open MPI's shared memory, see launch/engines/openmpi.sh.
[ -z "${MLPERF_RN50_JOB:-}" ] || mkdir -m 700 "/dev/shm/mlperf_rn50-$MLPERF_RN50_JOB" 2>/dev/null || true
if [ "${MLPERF_RN50_RANKS_PER_DEVICE:-1}" != 1 ]; then
    "$here/launch/mps.sh" start
    CUDA_MPS_PIPE_DIRECTORY=$("$here/launch/mps.sh" folder)
    export CUDA_MPS_PIPE_DIRECTORY
fi
exec "$here/.venv/bin/python" "$here/mlperf_rn50/launch/safe_path.py" mlperf_rn50.system.topology "$@"
