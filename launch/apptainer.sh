#!/usr/bin/env bash
# Trains with every rank in an Apptainer image, for example with --image FILE --config FILE; see --help.
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch apptainer "$@"
