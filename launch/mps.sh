#!/usr/bin/env bash
# Starts or stops NVIDIA's Multi-Process Service on this node, for several ranks per GPU.
# Usage: launch/mps.sh start|stop|folder     launch/bind.sh and the launchers call it for --ranks-per-device above 1
# Without a GPU nothing is started, and ranks share a core set.
# folder prints the pipe folder: CUDA_MPS_PIPE_DIRECTORY, or a folder in /tmp with the same name for all ranks of a node.
# The pipe folder must not be a link. This user must own it, and its mode must be 700.

. "$(dirname -- "${BASH_SOURCE[0]}")/engines/help.sh"
set -euo pipefail
read -r HOSTNAME </proc/sys/kernel/hostname # the variable may come from another host
folder=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mlperf_rn50-mps-$EUID}
while [[ $folder == ?*/ ]]; do folder=${folder%/}; done # with a trailing slash, a link would be followed

fail() {
    echo "launch/mps.sh: $1" >&2
    exit 2
}
# Rejects a folder that other users can write to or have created.
check_folder() {
    local state
    state=$(LC_ALL=C stat -c '%F, owner %u, mode %a' -- "$folder" 2>/dev/null) || state=nothing
    [[ $state =~ ^directory,\ owner\ $EUID,\ mode\ 2?700$ ]] ||
        fail "$folder on $HOSTNAME: got ${state/directory/a folder}, expected a folder, owner $EUID, mode 700; remove it, or set CUDA_MPS_PIPE_DIRECTORY to a folder of yours"
}
ask() { # QUESTION
    echo "$1" | timeout 30 nvidia-cuda-mps-control >/dev/null 2>&1
}

lock_folder() {
    exec 9<"$folder"
    flock -w 60 9 || fail "$folder on $HOSTNAME is locked by another start or stop of the service for 60 s; end that, or set CUDA_MPS_PIPE_DIRECTORY to another folder"
}
answer() { # QUESTION
    echo "$1" | timeout 30 nvidia-cuda-mps-control 2>/dev/null || true
}
# Succeeds if a process of another launcher uses the service. Without a launcher, all are ended.
has_other_clients() {
    local server client variables job
    [ -n "${MLPERF_RN50_JOB:-}" ] || return 1
    for server in $(answer get_server_list); do
        for client in $(answer "get_client_list $server"); do
            variables=$(tr '\0' '\n' 2>/dev/null <"/proc/$client/environ") 2>/dev/null || variables=''
            [ -n "$variables" ] || continue # it has ended
            job=$(sed -n 's/^MLPERF_RN50_JOB=//p' <<<"$variables")
            [ "${job%-*}" = "${MLPERF_RN50_JOB%-*}" ] || return 0
        done
    done
    return 1
}

case ${1:-} in
    start | stop) ;;
    folder) printf '%s\n' "$folder"; exit ;;
    *) print_header >&2; exit 2 ;;
esac
timeout 60 nvidia-smi -L >/dev/null 2>&1 || exit 0
command -v nvidia-cuda-mps-control >/dev/null ||
    fail "nvidia-cuda-mps-control is missing on $HOSTNAME; install it with the driver, or use --ranks-per-device 1"
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-$folder/log}
if [ "$1" = stop ]; then
    [ -e "$folder" ] || [ -L "$folder" ] || exit 0
    check_folder
    lock_folder
    ! has_other_clients || exit 0
    # With a time limit, or it would wait for the work of killed ranks.
    ask 'quit -t 10' || exit 0
    end=$((SECONDS + 30))
    while ask get_server_list && ((SECONDS < end)); do sleep 0.1; done
    exit
fi
mkdir -m 700 -- "$folder" 2>/dev/null || true # the mode of an existing folder is not changed
check_folder
mkdir -p -- "$CUDA_MPS_LOG_DIRECTORY" || fail "$CUDA_MPS_LOG_DIRECTORY cannot be created; set CUDA_MPS_LOG_DIRECTORY to a different folder"
# The first rank of a node starts the service. The lock is on the folder, so that no file is opened for writing. Four
# variables are removed. The thread limit would also apply to clients of later runs. With HOROVOD_RANK, launch/guard.sh
# would mistake the service for a rank. With MLPERF_RN50_JOB, it would end with the doctor, while ranks use it. With
# CUDA_VISIBLE_DEVICES, the service would serve only some GPUs and renumber them; this variable stays only for a MIG
# instance, which is served only by name.
limits=(-u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE -u HOROVOD_RANK -u MLPERF_RN50_JOB)
[[ ${CUDA_VISIBLE_DEVICES:-} == MIG-* ]] || limits+=(-u CUDA_VISIBLE_DEVICES)
lock_folder
ask get_server_list && exit
env "${limits[@]}" nvidia-cuda-mps-control -d 9<&- || fail "the service does not start on $HOSTNAME; see $CUDA_MPS_LOG_DIRECTORY, or use --ranks-per-device 1"
# Programs that start before the service answers run without it.
end=$((SECONDS + 30))
until ask get_server_list; do
    ((SECONDS < end)) || fail "the service on $HOSTNAME does not answer 30 s after its start; see $CUDA_MPS_LOG_DIRECTORY, or use --ranks-per-device 1"
    sleep 0.1
done
