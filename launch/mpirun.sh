#!/usr/bin/env bash
# Trains on hosts reached with ssh, started by Open MPI's mpirun; the checkout is at the same path on all of them.
# Usage: launch/mpirun.sh --hosts h1,h2,… | --hostfile FILE --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/mpirun.sh --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml --restarts 3

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=hosts.sh
source "$here/launch/hosts.sh"
engine_option() {
    host_option "$@"
}
# shellcheck source-path=SCRIPTDIR source=openmpi.sh
source "$here/launch/openmpi.sh"
launch "$@"
