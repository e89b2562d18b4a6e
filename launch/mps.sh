#!/usr/bin/env bash
# Starts or stops NVIDIA's Multi-Process Service on this node, for several ranks per GPU.
# Usage: launch/mps.sh start|stop|folder     launch/bind.sh and the launchers call it for --ranks-per-device above 1
# Without a GPU there is nothing to start: ranks then share a core set.
# folder prints where the service and its clients meet: CUDA_MPS_PIPE_DIRECTORY, or a folder of this user in /tmp, which
# all ranks of a node find without being told. It must be a folder of mode 700 that belongs to this user, and no link.

set -euo pipefail
folder=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mlperf_rn50-mps-$EUID}
while [[ $folder == ?*/ ]]; do folder=${folder%/}; done # a link with a slash behind it would be followed

fail() {
    echo "launch/mps.sh: $1" >&2
    exit 2
}
# What others could write to, or have put there, is left alone.
check_folder() {
    local found
    found=$(stat -c '%F, owner %u, mode %a' -- "$folder" 2>/dev/null) || found=nothing
    [[ $found =~ ^directory,\ owner\ $EUID,\ mode\ 2?700$ ]] ||
        fail "$folder on $HOSTNAME: got ${found/directory/a folder}, expected a folder, owner $EUID, mode 700; remove it, or set CUDA_MPS_PIPE_DIRECTORY to a folder of yours"
}
ask() { # QUESTION
    echo "$1" | nvidia-cuda-mps-control >/dev/null 2>&1
}

case ${1:-} in
    start | stop) ;;
    folder) printf '%s\n' "$folder"; exit ;;
    *) sed -n '2,6s/^# //p' "$0" >&2; exit 2 ;;
esac
nvidia-smi -L >/dev/null 2>&1 || exit 0
command -v nvidia-cuda-mps-control >/dev/null ||
    fail "nvidia-cuda-mps-control is missing on $HOSTNAME; it comes with the driver, or use --ranks-per-device 1"
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-$folder/log}
if [ "$1" = stop ]; then
    [ -e "$folder" ] || [ -L "$folder" ] || exit 0
    check_folder
    ask quit || true
    exit
fi
mkdir -m 700 -- "$folder" 2>/dev/null || true # what is there already stays as it is
check_folder
mkdir -p -- "$CUDA_MPS_LOG_DIRECTORY" || fail "$CUDA_MPS_LOG_DIRECTORY cannot be made; set CUDA_MPS_LOG_DIRECTORY to another folder"
# Every rank of a node asks, and the first one starts it. The folder is its own lock: no file is opened to be written.
# The service takes none of that rank's limits: with its CUDA_VISIBLE_DEVICES it would serve no other GPU and number the
# rest anew, and a limit of threads that it has itself holds for its clients of later runs, too, whatever they ask for.
# An instance of a GPU (MIG) is served only where the service is told its name.
# Nor is it a rank, which launch/guard.sh may ask to stop.
limits=(-u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE -u HOROVOD_RANK)
[[ ${CUDA_VISIBLE_DEVICES:-} == MIG-* ]] || limits+=(-u CUDA_VISIBLE_DEVICES)
exec 9<"$folder"
flock 9
ask get_server_list || env "${limits[@]}" nvidia-cuda-mps-control -d 9<&-
