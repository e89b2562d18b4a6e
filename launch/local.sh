#!/usr/bin/env bash
# Trains on this machine with a number of ranks.
# Usage: launch/local.sh RANKS OPTIONS...      the options are those of: mlperf-rn50 train
# Example: launch/local.sh 2 --config launch/configs/digits_cpu.yaml --run.seed 1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -lt 1 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ranks=$1
shift
exec "$here/launch/ranks.sh" "$ranks" "$here/.venv/bin/mlperf-rn50" train "$@"
