#!/usr/bin/env bash
# Starts a program on this machine with one or more ranks, like the launchers do; for measurements and tests.
# Usage: launch/ranks.sh RANKS PROGRAM [ARGUMENTS...]
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
