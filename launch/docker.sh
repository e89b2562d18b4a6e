#!/usr/bin/env bash
# Trains on this node in a docker or podman container; the image is built from the Dockerfile.
# Usage: launch/docker.sh [--image IMAGE] [--mount DIR]... --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/docker.sh --image mlperf_rn50:cu117 --mount /data --ranks-per-node 4
#              --config launch/configs/c4140_v100_1node.yaml
#   --image IMAGE   default mlperf_rn50:cpu
#   --mount DIR     additional folder to mount at the same path, such as the data folder
# All other options are passed to launch/local.sh. MLPERF_RN50_DOCKER sets the engine (default: docker, else podman).

. "$(dirname -- "${BASH_SOURCE[0]}")/engines/help.sh"
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
set -euo pipefail
MLPERF_RN50_COMMAND=$(quote_words "$0" "$@")
export MLPERF_RN50_COMMAND
fail() {
    echo "launch/docker.sh: $*" >&2
    exit 2
}
engine=${MLPERF_RN50_DOCKER:-$(command -v docker || command -v podman || fail 'found neither docker nor podman; install one')}
image=mlperf_rn50:cpu options=() rest=()
add_mount() { # FOLDER, at the same path; --volume would refuse colons
    options+=(--mount "type=bind,source=$1,target=$1")
}
add_mount "$PWD"
while [ $# -gt 0 ]; do
    case $1 in
        --image | --mount) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
        --image) image=$2; shift ;;
        --mount)
            [ -d "$2" ] || fail "--mount: got $2, expected a folder"
            add_mount "$(realpath "$2")"
            shift ;;
        *) rest+=("$1") ;;
    esac
    shift
done
for name in $("$(dirname -- "${BASH_SOURCE[0]}")/engines/variables.sh"); do
    options+=(--env "$name")
done
if command -v nvidia-smi >/dev/null; then
    case $(basename "$engine") in
        podman) options+=(--device nvidia.com/gpu=all) ;; # Container Device Interface
        *) options+=(--gpus all) ;;
    esac
    options+=(--ulimit memlock=-1)
fi
# Without root, podman gives other ids to the container, which could then not write to the folders.
if [[ $(basename "$engine") = podman && $EUID != 0 ]]; then
    options+=(--userns keep-id)
fi
# env.json records the digest, and not the name, which may contain a host.
digest=$("$engine" image inspect --format '{{.Id}}' "$image" 2>/dev/null) || digest=''
options+=(--env "MLPERF_RN50_IMAGE=$digest")
# Use the host's shared memory and the user's ids. Let `docker stop` wait longer than 10 s, for a checkpoint.
exec "$engine" run --rm --network host --ipc host --user "$(id -u):$(id -g)" --env HOME=/tmp --stop-timeout 630 \
    --workdir "$PWD" "${options[@]}" --entrypoint /opt/mlperf_rn50/launch/local.sh "$image" "${rest[@]}"
