#!/usr/bin/env bash
# Trains with every rank in an Apptainer image, on this node or on hosts reached with ssh; mpirun runs outside the image.
# Usage: launch/apptainer.sh --image FILE [--hosts h1,h2,… | --hostfile FILE] --config FILE --ranks-per-node R [OPTIONS...]
# Example: apptainer build mlperf_rn50.sif docker-daemon:mlperf_rn50:cu117
#          launch/apptainer.sh --image mlperf_rn50.sif --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml
# All hosts need the image and the checkout at the same paths; image and .venv must have the same version of mpirun.
exec "$(dirname -- "${BASH_SOURCE[0]}")/engines/launcher.sh" "${BASH_SOURCE[0]}" "$@"
