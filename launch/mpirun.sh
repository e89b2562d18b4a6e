#!/usr/bin/env bash
# Trains on hosts reached with ssh, with Open MPI's mpirun, for example with --hosts h1,h2 --config FILE; see --help.
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch mpirun "$@"
