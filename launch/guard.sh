#!/usr/bin/env bash
# Guards the ranks of a job on one host; launchers that use ssh start one for each host.
# Usage: launch/guard.sh --host HOST --launcher PID JOB    next to the launcher: prints "ready", closes its output,
#                                                          stays connected to the host, forwards USR1, the stop
#                                                          request, to the ranks there, and sends USR2 to the
#                                                          launcher when the host is lost
#        launch/guard.sh JOB                               on the host: ends the ranks when the launcher is gone

set -u
# Stdin has a line from the launcher every 5 s; after 20 s without one, end the ranks.
guard_here() {
    local word signal pid
    while read -r -t 20 word; do
        [ "$word" != stop ] || ask_to_stop
    done
    trap '' HUP TERM PIPE
    for signal in TERM KILL; do # TERM leaves time for a checkpoint
        for pid in $(ranks); do
            kill "-$signal" "$pid" 2>/dev/null
        done
        for _ in {1..15}; do
            [ -n "$(ranks)" ] || break 2
            sleep 1
        done
    done
    # Open MPI does not clean up after a killed job, see launch/engines/openmpi.sh.
    rm -rf -- "/dev/shm/mlperf_rn50-$job" "${TMPDIR:-/tmp}/mlperf_rn50-$job"
}
ranks() {
    grep -lsz "^MLPERF_RN50_JOB=$job\$" /proc/[0-9]*/environ | cut -d/ -f3
}
# Signals only ranks that catch USR1, because it would kill a starting rank. A later request reaches that rank.
ask_to_stop() {
    local pid
    for pid in $(ranks); do
        if grep -qsz '^HOROVOD_RANK=' "/proc/$pid/environ" && catches_usr1 "$pid"; then
            kill -USR1 "$pid" 2>/dev/null
        fi
    done
}
catches_usr1() { # PID; signal 10 is bit 9 of the mask, see proc(5)
    [[ $(grep -s '^SigCgt:' "/proc/$1/status") =~ [2367abef]..$ ]]
}
reach() { # HOST JOB
    case $1 in
        localhost | 127.0.0.1 | "$(hostname)" | "$(hostname -s)") exec "$0" "$2" ;;
    esac
    exec ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "$1" \
        "$(printf '%q ' "$0" "$2")"
}
keep_in_touch() { # HOST LAUNCHER JOB
    local pipe guard word=
    trap 'word=stop' USR1
    echo ready
    exec >/dev/null # the launcher waits until all guards have closed their common output
    exec {pipe}> >(reach "$1" "$3" >/dev/null 2>&1)
    guard=$!
    trap 'exit 0' TERM # closes the pipe, so that the guard on the host ends
    trap '' PIPE
    while kill -0 "$2" 2>/dev/null; do
        echo "$word" >&"$pipe" || break
        kill -0 "$guard" || break
        sleep 5 {pipe}>&- &
        wait -n $! "$guard"
    done 2>/dev/null
    kill -USR2 "$2" 2>/dev/null
}

# With other characters, such as ../, a job could select the files of other jobs.
if [ $# -gt 0 ] && [[ ! ${!#} =~ ^[0-9a-z-]+$ ]]; then
    set --
fi
case $# in
    1) job=$1; guard_here ;;
    5) keep_in_touch "$2" "$4" "$5" ;;
    *) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
