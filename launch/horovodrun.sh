#!/usr/bin/env bash
# Trains on hosts reached with ssh, with horovodrun, for example with --hosts h1,h2 --config FILE; see --help.
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch horovodrun "$@"
