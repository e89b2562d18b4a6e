#!/usr/bin/env bash
# Trains with every rank in an Apptainer image, on this node or on hosts reached with ssh (mpirun outside, ranks inside).
# Usage: launch/apptainer.sh --image FILE [--hosts h1,h2,… | --hostfile FILE] --config FILE --ranks-per-node R [OPTIONS...]
# Example: apptainer build mlperf_rn50.sif docker-daemon:mlperf_rn50:cu117
#          launch/apptainer.sh --image mlperf_rn50.sif --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml
# The image and the checkout with its .venv (for mpirun, of the same version) are at the same paths on all hosts.

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=hosts.sh
source "$here/launch/hosts.sh"
# shellcheck source-path=SCRIPTDIR source=openmpi.sh
source "$here/launch/openmpi.sh"
ranks=()

engine_option() {
    local gpu=()
    if [ "$1" != --image ]; then
        host_option "$@"
        return
    fi
    needs_value "$@"
    [ -e "$2" ] || fail "--image: $2 does not exist; build it with: apptainer build $2 docker-daemon:mlperf_rn50:cpu"
    command -v nvidia-smi >/dev/null && gpu=(--nv)
    ranks=(apptainer exec "${gpu[@]}" --bind "$PWD" --bind "$here" --pwd "$PWD" "$2"
        /opt/mlperf_rn50/launch/bind.sh /opt/mlperf_rn50/.venv/bin/mlperf-rn50)
    num_taken=2
}
before_start() {
    [ ${#ranks[@]} -gt 0 ] || fail '--image: got nothing, expected an Apptainer image'
}
launch "$@"
