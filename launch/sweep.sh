#!/usr/bin/env bash
# Trains each layout (nodes x ranks) of a list with several seeds; see --help.
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program sweep "$@"
