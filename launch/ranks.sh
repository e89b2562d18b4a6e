#!/usr/bin/env bash
# Starts a program on this machine with a number of ranks, as the launchers do; the tests use it.
# Usage: launch/ranks.sh RANKS PROGRAM [ARGUMENTS...]
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
