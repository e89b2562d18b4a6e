#!/usr/bin/env bash
# Starts a program with ranks, here or on hosts: launch/ranks.sh [--hosts h1,h2,...] RANKS PROGRAM [ARGUMENTS...]
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch ranks "$@"
