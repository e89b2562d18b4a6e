#!/usr/bin/env bash
# Trains on hosts reached with ssh, started by horovodrun over Gloo: no MPI; the checkout is at the same path on all.
# Usage: launch/horovodrun.sh --hosts h1,h2,… | --hostfile FILE --config FILE --ranks-per-node R [OPTIONS...]
# Example: launch/horovodrun.sh --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=hosts.sh
source "$here/launch/hosts.sh"
engine_option() {
    host_option "$@"
}
# horovodrun hands SIGTERM on to its ranks and gives them 5 s for their checkpoint.
stop_signal=TERM

start_ranks() {
    local slots=localhost:$ranks_per_node report code=0
    [ ${#hosts[@]} -eq 0 ] || printf -v slots "%s:$ranks_per_node," "${hosts[@]}"
    report=$(mktemp)
    # Its own traceback says one thing, the exit code of the first rank that failed; that one is handed on.
    run_engine "$here/.venv/bin/horovodrun" --gloo -np $((num_nodes * ranks_per_node)) -H "${slots%,}" \
        --disable-cache "$@" 2> >(awk -v report="$report" '
            /^Traceback \(most recent call last\)/ { own = 1 }
            own && /^Exit code: / { print $3 > report; close(report); own = 0; next }
            !own { sub(/^\[[0-9]+\]<stderr>:/, ""); print; fflush() }' >&2) \
        > >(sed -u 's/^\[[0-9]*\]<stdout>://') || code=$?
    wait
    [ ! -s "$report" ] || code=$(<"$report")
    rm -f "$report"
    return "$code"
}
launch "$@"
