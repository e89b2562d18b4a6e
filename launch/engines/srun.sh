#!/usr/bin/env bash
# Executes srun to start a program on nodes of a Slurm job, with the same number of ranks on each; MPI uses PMIx.
# Usage: launch/engines/srun.sh HOST:RANKS[,HOST:RANKS...] [SRUN OPTIONS...] PROGRAM [ARGUMENTS...]
set -euo pipefail
# Validate the ranks before shell arithmetic, which would evaluate other text as an expression.
[[ ${1:-} =~ ^[A-Za-z0-9._-]+:[1-9][0-9]*(,[A-Za-z0-9._-]+:[1-9][0-9]*)*$ ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
slots=$1
shift
IFS=, read -r -a hosts <<<"$slots"
num_nodes=${#hosts[@]} ranks_per_node=${slots##*:}
export SLURM_CPU_BIND=none # launch/bind.sh binds the ranks
exec srun --mpi=pmix --nodes "$num_nodes" --ntasks $((num_nodes * ranks_per_node)) --ntasks-per-node "$ranks_per_node" \
    --kill-on-bad-exit=1 --quit-on-interrupt --export=ALL "$@"
