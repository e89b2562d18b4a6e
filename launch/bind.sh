#!/usr/bin/env bash
# Runs a rank on its share of the node: cores of one NUMA node, OMP_NUM_THREADS, nearest GPU; prints which.
# Usage: launch/bind.sh PROGRAM [ARGUMENTS...]     every launcher puts it before its ranks
# MLPERF_RN50_BIND=off leaves the rank unbound. An OMP_NUM_THREADS that is set already stays.
# SIGUSR1, the word to stop, waits until the program lets it in.
set -euo pipefail
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# For Open MPI's shared memory, see launch/engines/openmpi.sh.
[ -z "${MLPERF_RN50_JOB:-}" ] || mkdir -m 700 "/dev/shm/mlperf_rn50-$MLPERF_RN50_JOB" 2>/dev/null || true
if [ "${MLPERF_RN50_RANKS_PER_DEVICE:-1}" != 1 ]; then
    "$here/launch/mps.sh" start
    CUDA_MPS_PIPE_DIRECTORY=$("$here/launch/mps.sh" folder)
    export CUDA_MPS_PIPE_DIRECTORY
fi
exec "$here/.venv/bin/python" "$here/mlperf_rn50/launch/safe_path.py" mlperf_rn50.system.topology "$@"
