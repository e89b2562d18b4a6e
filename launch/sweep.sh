#!/usr/bin/env bash
# Trains each layout (nodes x ranks) of a list with several seeds; the logs are logs/<study>/<layout>/result_<k>.txt.
# Usage: launch/sweep.sh --study NAME --layouts '1x4 2x4 4x4' --config FILE [OPTIONS...]
# Example: launch/sweep.sh --study c4140 --layouts '1x4 2x4 4x4 8x4' --seeds 5 --weak --hostfile hosts
#              --config launch/configs/c4140_v100_1node.yaml
# Complete layouts are skipped. A failed run is reported, and the sweep continues.
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
