#!/usr/bin/env bash
# Binds a rank to the nearest GPU and a share of the cores near it, sets OMP_NUM_THREADS, and prints the binding.
# Usage: launch/bind.sh PROGRAM [ARGUMENTS...]     all launchers start their ranks with this script
# MLPERF_RN50_BIND=off disables binding. The first number of an existing OMP_NUM_THREADS is kept.
# SIGUSR1, the stop request, is blocked until the program unblocks it.
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/help.sh"
set -euo pipefail
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/launch/engines/program.sh"
# Create the folder for Open MPI's shared memory, see launch/engines/openmpi.sh.
[ -z "${MLPERF_RN50_JOB:-}" ] || mkdir -m 700 "/dev/shm/mlperf_rn50-$MLPERF_RN50_JOB" 2>/dev/null || true
if [ "${MLPERF_RN50_RANKS_PER_DEVICE:-1}" != 1 ] && [ "${MLPERF_RN50_DEVICE:-}" != cpu ]; then
    "$here/launch/mps.sh" start
    CUDA_MPS_PIPE_DIRECTORY=$("$here/launch/mps.sh" folder)
    export CUDA_MPS_PIPE_DIRECTORY
fi
# Horovod 0.28.1 looks up the host's own name for Gloo, also if an interface is selected, and crashes without an address.
if [[ -n ${HOROVOD_GLOO_RENDEZVOUS_ADDR:-} && -z ${OMPI_COMM_WORLD_RANK:-}${PMIX_RANK:-} ]] &&
    command -v getent >/dev/null; then
    read -r HOSTNAME </proc/sys/kernel/hostname # the variable may come from another host
    address=$(getent ahostsv4 "$HOSTNAME" | sed 's/ .*//;q') || true
    if [ -z "$address" ] || [[ $address = 127.* && ${HOROVOD_CROSS_SIZE:-1} != 1 ]]; then
        echo "launch/bind.sh: host name $HOSTNAME: got ${address:-no address}, expected one that other hosts reach; correct \
/etc/hosts or the name there, or use launch/mpirun.sh" >&2
        exit 2
    fi
fi
exec "$here/.venv/bin/python" -I -m mlperf_rn50.system.topology "$@"
