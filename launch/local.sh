#!/usr/bin/env bash
# Trains on this machine with one or more ranks.
# Usage: launch/local.sh --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/local.sh --config launch/configs/digits_cpu.yaml --ranks-per-node 2 --run.seed 1
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
