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
            add_mount "$(realpath -s "$2")" # the data are looked for there, also if this is a link
            shift ;;
        *) rest+=("$1") ;;
    esac
    shift
done
for name in $("$(dirname -- "${BASH_SOURCE[0]}")/engines/variables.sh"); do
    options+=(--env "$name")
done
kind=$(basename "$engine") user=$(id -u):$(id -g) groups=$(id -G) is_rootless=''
[[ $("$engine" --version 2>/dev/null) != *podman* ]] || kind=podman # podman-docker
# Without root, an engine gives other ids to the container, which could then not write to the folders.
if [[ $EUID != 0 && $kind = podman ]]; then
    is_rootless=yes
    [[ $groups = *' '* ]] && groups=keep-groups || groups=''
    options+=(--userns keep-id)
elif [[ $EUID != 0 && $("$engine" info --format '{{.SecurityOptions}}' 2>/dev/null) = *rootless* ]]; then
    is_rootless=yes groups='' user=0:0 # which is this user outside
fi
for group in $groups; do
    options+=(--group-add "$group")
done
# env.json records the digest, and not the name, which may contain a host.
read -r digest variant < <("$engine" image inspect \
    --format '{{.Id}} {{index .Config.Labels "mlperf_rn50.variant"}}' "$image" 2>/dev/null) || true
options+=(--env "MLPERF_RN50_IMAGE=${digest:-}")
if [ "${variant:-}" != cpu ] && command -v nvidia-smi >/dev/null; then
    case $kind in
        podman) options+=(--device nvidia.com/gpu=all) ;; # Container Device Interface
        *) options+=(--gpus all) ;;
    esac
    # without root, a limit cannot be raised
    [[ $is_rootless && $(ulimit -Hl) != unlimited ]] || options+=(--ulimit memlock=-1)
fi
# Use the host's shared memory and the user's ids. Let `docker stop` wait longer than 10 s, for a checkpoint.
exec "$engine" run --rm --network host --ipc host --user "$user" --env HOME=/tmp --stop-timeout 630 \
    --workdir "$PWD" "${options[@]}" --entrypoint /opt/mlperf_rn50/launch/local.sh "$image" "${rest[@]}"
