#!/usr/bin/env bash
# Starts a program on this machine with a number of ranks, as the launchers do; the tests use it.
# Usage: launch/ranks.sh RANKS PROGRAM [ARGUMENTS...]

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=openmpi.sh
source "$here/launch/openmpi.sh"
[ $# -gt 1 ] && [[ $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
num_nodes=1 ranks_per_node=$1
shift
set_environment
export HOROVOD_CYCLE_TIME=${HOROVOD_CYCLE_TIME:-5} # as the program sets it on CPUs
start_ranks "$here/launch/bind.sh" "$@"
