#!/usr/bin/env bash
# Starts a program on this machine with a number of ranks; launch/local.sh and the tests use it.
# Usage: launch/ranks.sh RANKS PROGRAM [ARGUMENTS...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ranks=$1
shift
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
threads=$(($(nproc) / ranks))
# A rank that waits must leave its core to the others: MPI yields, and Horovod looks for work every 5 ms.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export HOROVOD_CYCLE_TIME=${HOROVOD_CYCLE_TIME:-5}
# Large pages for the allocator: fewer page faults on batches and gradients.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
"$here/.venv/bin/mpirun" --quiet -np "$ranks" --oversubscribe --bind-to none \
    --mca mpi_yield_when_idle 1 --mca btl_vader_single_copy_mechanism none "$@" &
mpirun=$!
# mpirun kills its ranks a second after SIGTERM, but hands SIGUSR1 on to them and waits for their checkpoint.
trap 'kill -USR1 "$mpirun" 2>/dev/null' TERM USR1
while :; do
    code=0
    wait "$mpirun" || code=$?
    kill -0 "$mpirun" 2>/dev/null || exit "$code"
done
