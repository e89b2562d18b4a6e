#!/usr/bin/env bash
# Starts a program on this machine with one or more ranks: launch/ranks.sh RANKS PROGRAM [ARGUMENTS...]
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch ranks "$@"
