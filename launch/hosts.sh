# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # shared with common.sh
# Hosts reached with ssh; sourced after common.sh by the launchers that take them.
add_hosts() {
    local name
    for name in "$@"; do
        [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "host: got $name, expected a host name or an address"
        hosts+=("$name")
    done
}
host_option() {
    local names
    num_taken=2
    case $1 in
        --hosts)
            needs_value "$@"
            IFS=, read -ra names <<<"$2"
            add_hosts "${names[@]}" ;;
        --hostfile)
            needs_value "$@"
            [ -r "$2" ] || fail "--hostfile: cannot read $2"
            # One host a line; slots=N and comments, as in files of Open MPI, are left aside.
            mapfile -t names < <(sed 's/#.*//' "$2" | awk 'NF { print $1 }')
            add_hosts "${names[@]}" ;;
        *) num_taken=0 ;;
    esac
}
# A guard per host ends the ranks there when this launcher is gone or cut off, and tells it when the host is.
start_guards() {
    local host
    for host in "${hosts[@]}"; do
        "$here/launch/guard.sh" --host "$host" --launcher $$ "$job" &
        guards+=($!)
    done
}
answering_hosts() {
    local host
    for host in "${hosts[@]}"; do
        { timeout 10 ssh -n -o BatchMode=yes -o ConnectTimeout=5 "$host" true >/dev/null 2>&1 && echo "$host"; } &
    done
    wait
}
