#!/usr/bin/env bash
# Trains on this machine with a number of ranks.
# Usage: launch/local.sh --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/local.sh --config launch/configs/digits_cpu.yaml --ranks-per-node 2 --run.seed 1

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=openmpi.sh
source "$here/launch/openmpi.sh"
launch "$@"
