#!/usr/bin/env bash
# Trains on hosts reached with ssh, using horovodrun over Gloo, not MPI. The checkout has the same path on all hosts.
# Usage: launch/horovodrun.sh --hosts h1,h2,… | --hostfile FILE --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/horovodrun.sh --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
