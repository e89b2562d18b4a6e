#!/usr/bin/env bash
# Guards the ranks of a job on one host; launchers that use ssh start one for each host.
# Usage: launch/guard.sh --host HOST --launcher PID RUN_FOLDER JOB
#                                           next to the launcher: prints "ready", closes its output, stays connected to
#                                           the host, forwards USR1, the stop request, to the ranks there, and sends
#                                           USR2 to the launcher when the host is lost; if the host was never reached,
#                                           prints the reason to stderr
#        launch/guard.sh --here HOST RUN_FOLDER JOB
#                                           on the host: ends the ranks when the launcher is gone or does not answer;
#                                           if it did not answer, adds a line to failures.jsonl in the run folder
#        launch/guard.sh --list HOST... JOB
#                                           prints the processes of the job on the hosts; on a host with stopped ones, only
#                                           those

set -u
read -r HOSTNAME </proc/sys/kernel/hostname # the variable may come from another host, the program may be missing
readonly silence_s=20 login_s=60 list_s=15
# Stdin has a line from the launcher every 5 s; after 20 s without one, end the ranks.
guard_here() { # HOST RUN_FOLDER
    local word signal pid code
    trap '' PIPE
    echo "connected $job"
    while :; do
        read -r -t "$silence_s" word
        code=$?
        [ "$code" = 0 ] || break
        [ "$word" != stop ] || ask_to_stop
    done
    trap '' HUP TERM
    # In the background, because the run folder may be on the far side of the same failed network.
    [ "$code" -le 128 ] || note "$1" "$2" "had no contact to the launcher for $silence_s s" &
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
# Adds a line as written by mlperf_rn50/runfolder/records.py; it begins with a line end, because a kill or a full disk may
# have cut the last one.
note() { # HOST RUN_FOLDER CAUSE
    printf '\n{"job": "%s", "host": "%s", "cause": "%s", "is_outside": true, "time_s": %s}\n' \
        "$job" "$1" "$3" "$(date +%s.%N)" |
        dd of="$2/failures.jsonl" oflag=append,nofollow conv=notrunc status=none
} >/dev/null 2>&1
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
list_here() { # HOST
    local pid rank line all=() stopped=()
    for pid in $(ranks); do
        rank=$(grep -hszoE '^(OMPI_COMM_WORLD_RANK|PMIX_RANK|HOROVOD_RANK)=[0-9]+' "/proc/$pid/environ" |
            tr '\0' '\n' | sed -n '1s/.*=//p')
        line="process $pid ($(cat "/proc/$pid/comm" 2>/dev/null)${rank:+, rank $rank}) on $1"
        all+=("$line")
        ! grep -qs '^State:.[Tt]' "/proc/$pid/status" || stopped+=("$line, which is stopped")
    done
    [ ${#stopped[@]} = 0 ] || all=("${stopped[@]}")
    [ ${#all[@]} = 0 ] || printf '%s\n' "${all[@]}"
}
list_on() { # HOST...
    local host
    for host in "$@"; do
        { (limit=$list_s reach "$host" --list-here "$host" "$job" </dev/null 2>/dev/null) ||
            echo "host $host, which does not answer"; } &
    done
    wait
}
reach() { # HOST ARGUMENTS...: runs this script on the host, for at most $limit seconds, if set
    case $1 in
        localhost | 127.0.0.1 | "$HOSTNAME" | "${HOSTNAME%%.*}") exec "$0" "${@:2}" ;;
    esac
    exec ${limit:+timeout --foreground "$limit"} ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 \
        -o ServerAliveCountMax=3 "$1" "$(printf '%q ' env "TMPDIR=${TMPDIR:-/tmp}" "$0" "${@:2}")"
}
# Connects its input to the far side. ConnectTimeout of ssh ends before the login, which may hang.
connect() { # HOST RUN_FOLDER
    local output far='' code line parent last='ssh gave no reason'
    # A login that hangs does not end with its input.
    trap 'kill $far; echo "$1 was not reached: no login before the end of the job" >&2; exit' TERM
    # Tell keep_in_touch, unless it has ended, because its number may be that of another process then.
    trap 'read -r _ _ _ parent _ </proc/$BASHPID/stat; [ "$parent" != $$ ] || kill -ALRM $$' EXIT
    SECONDS=0
    exec {output}< <(reach "$1" --here "$1" "$2" "$job" 2>&1 <&0)
    far=$!
    while :; do
        read -r -t $((login_s - SECONDS)) line <&"$output"
        code=$?
        [ "$code" = 0 ] || break # a rest without a line end is in $line
        if [ "$line" = "connected $job" ]; then
            trap '' TERM # the far side ends by itself, after its ranks
            while read -r line <&"$output"; do :; done
            exit
        fi
        last=$line
    done
    [ -z "$line" ] || last=$line
    [ "$code" -le 128 ] || last="no login within $login_s s"
    kill "$far" 2>/dev/null
    echo "$1 was not reached: $last" >&2
}
keep_in_touch() { # HOST LAUNCHER RUN_FOLDER
    local pipe='' guard='' word='' nap=''
    trap 'word=stop; [ -z "$pipe" ] || echo stop >&"$pipe"' USR1
    echo ready
    exec >/dev/null # the launcher waits until all guards have closed their common output
    trap 'kill $nap; kill -USR2 '"$2"'; exit 0' ALRM # from connect, when the host is lost
    exec {pipe}> >(connect "$1" "$3")
    guard=$!
    trap 'trap "" ALRM; kill "$guard" $nap; exit 0' TERM # closes the pipe, so that the guard on the host ends
    trap '' PIPE
    while kill -0 "$2" 2>/dev/null; do
        echo "$word" >&"$pipe" || break
        # Without a login no run can have begun, so a stop request ends the login; afterwards connect ignores TERM.
        [ -z "$word" ] || kill "$guard"
        kill -0 "$guard" || break
        sleep 5 {pipe}>&- &
        nap=$!
        wait "$nap"
    done 2>/dev/null
    kill "$guard" 2>/dev/null
    kill -USR2 "$2" 2>/dev/null
}

# With other characters, such as ../, a job could select the files of other jobs.
if [ $# -gt 0 ] && [[ ! ${!#} =~ ^[0-9a-z-]+$ ]]; then
    set --
fi
[ $# = 0 ] || job=${!#}
case "$#${1:-}" in
    6--host) keep_in_touch "$2" "$4" "$5" ;;
    4--here) guard_here "$2" "$3" ;;
    3--list-here) list_here "$2" ;;
    *--list) list_on "${@:2:$#-2}" ;;
    1--help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
    *) "$0" --help >&2; exit 2 ;;
esac
