#!/usr/bin/env bash
# Executes mpirun of Open MPI to start a program on hosts.
# Usage: launch/engines/openmpi.sh HOST:RANKS[,HOST:RANKS...] PROGRAM [ARGUMENTS...]     localhost is this machine
set -euo pipefail
# Validate the ranks before shell arithmetic, which would evaluate other text as an expression.
[[ ${1:-} =~ ^[A-Za-z0-9._-]+:[1-9][0-9]*(,[A-Za-z0-9._-]+:[1-9][0-9]*)*$ ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
slots=$1 num_ranks=0
shift
for host in ${slots//,/ }; do
    ((num_ranks += ${host##*:}))
done
[ "$EUID" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
options=(--bind-to none --oversubscribe --mca mpi_yield_when_idle 1 --mca btl_vader_single_copy_mechanism none
    # Detect a lost host after 25 s without an answer.
    --mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 3
    # Start all hosts from here; from the 65th on, another host would, which may lack the key.
    --mca plm_rsh_no_tree_spawn 1
    # End the other ranks at once when one has failed; the default of 1 s is waited four times in a row. Ranks that must
    # write a checkpoint are stopped by SIGUSR1 instead.
    --mca odls_base_sigkill_timeout 0
    # Separate folders per job, removed by the launcher or guard at the end; launch/bind.sh creates the second one.
    --mca orte_tmpdir_base "${TMPDIR:-/tmp}/mlperf_rn50-$MLPERF_RN50_JOB"
    --mca btl_vader_backing_directory "/dev/shm/mlperf_rn50-$MLPERF_RN50_JOB")
# Open MPI cuts host names at the first dot, but some hosts resolve only by their full names.
[[ $slots != *.*[a-z]* ]] || options+=(--mca orte_keep_fqdn_hostnames 1)
# Its help texts would follow every failure of a rank, so they are printed only while the launcher looks for a fault.
[ -n "${MLPERF_RN50_MPI_HELP:-}" ] || options+=(--quiet)
# For the doctor, which measures how long a start of the ranks takes.
read -r up_s _ </proc/uptime
read -r boot </proc/sys/kernel/random/boot_id
export MLPERF_RN50_STARTED="$boot $up_s"
for name in $("$here/launch/engines/variables.sh"); do
    # A batch system lists GPUs of this host by UUID, which other hosts do not have.
    [[ $name = CUDA_VISIBLE_DEVICES && ${!name} = *[A-Za-z]* && $slots = *,* ]] || options+=(-x "$name")
done
start=()
# mpirun splits the command of orted at spaces
if [[ $here = *[[:space:]]* && (-n ${SLURM_JOB_ID:-} || $slots != localhost:*) ]]; then
    echo "$here: got a path with a space, expected none under Slurm or with other hosts; move the checkout" >&2
    exit 2
fi
if [ -n "${SLURM_JOB_ID:-}" ]; then # under launch/slurm.sbatch, mpirun starts orted with srun
    start=("$here/.venv/bin/python" -I "$here/launch/engines/block_term.py")
    options+=(--mca orte_launch_agent "${start[*]} $here/.venv/bin/orted")
fi
exec "${start[@]}" "$here/.venv/bin/mpirun" "${options[@]}" -np "$num_ranks" --host "$slots" "$@"
