#!/usr/bin/env bash
# Trains on this machine with one or more ranks, for example with --config FILE --ranks-per-node R; see --help.
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch local "$@"
