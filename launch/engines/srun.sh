#!/usr/bin/env bash
# Starts a program with srun on nodes of a Slurm job, as many ranks on each, and becomes srun; they meet over Gloo.
# Usage: launch/engines/srun.sh HOST:RANKS[,HOST:RANKS...] [SRUN OPTIONS...] PROGRAM [ARGUMENTS...]
set -euo pipefail
# Numbers of it are calculated with, which a shell would not do with words of others.
[[ ${1:-} =~ ^[A-Za-z0-9._-]+:[1-9][0-9]*(,[A-Za-z0-9._-]+:[1-9][0-9]*)*$ ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
slots=$1
shift
IFS=, read -r -a hosts <<<"$slots"
num_nodes=${#hosts[@]} ranks_per_node=${slots##*:}
export SLURM_CPU_BIND=none # launch/bind.sh binds
# This node serves as the meeting point; it lives as long as somebody holds the other end of its output.
MLPERF_RN50_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # only who knows it is answered there
export MLPERF_RN50_SECRET
exec {meeting}< <("$here/.venv/bin/python" "$here/mlperf_rn50/safe_path.py" mlperf_rn50.system.rendezvous "$(IFS=,; echo "${hosts[*]%%:*}")")
if ! read -r MLPERF_RN50_RENDEZVOUS <&"$meeting"; then
    echo 'launch/slurm.sbatch: the meeting point of the ranks did not start' >&2
    exit 1
fi
export MLPERF_RN50_RENDEZVOUS
exec srun --nodes "$num_nodes" --ntasks $((num_nodes * ranks_per_node)) --ntasks-per-node "$ranks_per_node" \
    --kill-on-bad-exit=1 --export=ALL "$@"
