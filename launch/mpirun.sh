#!/usr/bin/env bash
# Trains on hosts reached with ssh, with Open MPI's mpirun; the checkout must have the same path on all hosts.
# Usage: launch/mpirun.sh --hosts h1,h2,… | --hostfile FILE --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/mpirun.sh --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml --restarts 3
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
