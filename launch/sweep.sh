#!/usr/bin/env bash
# Trains a list of layouts, nodes x ranks, with several seeds each, into logs/<study>/<nodes>x<ranks>/result_<k>.txt.
# Usage: launch/sweep.sh --study NAME --layouts '1x4 2x4 4x4' --config FILE [OPTIONS...]
# Example: launch/sweep.sh --study c4140 --layouts '1x4 2x4 4x4 8x4' --seeds 5 --weak --hostfile hosts
#              --config launch/configs/c4140_v100_1node.yaml
#   --weak | --strong   keep the images per rank, or the images per step (default --strong)
#   --lr-table FILE     lines of: global_batch base_lr warmup_epochs. Without it the learning rate follows the
#                       global batch in proportion, from the first layout's, and the warm-up keeps its epochs
#   --engine NAME       mpirun (default) or horovodrun, with --hosts or --hostfile; without hosts the ranks of
#                       all nodes run on this machine, and the log says so
# What is there and complete is skipped; a run that fails is reported and the next one starts.

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
study='' layouts='' scaling=strong lr_table='' launcher=mpirun has_hosts='' rest=()

parse_sweep() {
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) usage; exit 0 ;;
            --study) needs_value "$@"; study=$2; shift ;;
            --layouts) needs_value "$@"; layouts=$2; shift ;;
            --config) needs_value "$@"; config=$2; shift ;;
            --seeds) needs_count "$@"; seeds=$2; shift ;;
            --weak) scaling=weak ;;
            --strong) scaling=strong ;;
            --lr-table) needs_value "$@"; lr_table=$2; shift ;;
            --engine) needs_value "$@"; launcher=$2; shift ;;
            --hosts | --hostfile) needs_value "$@"; has_hosts=1; rest+=("$1" "$2"); shift ;;
            --run-dir | --nodes | --ranks-per-node | --resume) fail "$1: the sweep sets it itself; leave it out" ;;
            --train.local_batch_size* | --train.global_batch_size* | --schedule.base_lr* | --schedule.warmup_epochs*)
                fail "${1%%=*}: each layout has its own; set the first layout's in the configuration" ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
    [[ $study =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "--study: got '$study', expected a name for the folder in logs/"
    [ -n "$layouts" ] || fail "--layouts: got nothing, expected a list such as '1x4 2x4'"
    [ -n "$config" ] || fail '--config: got nothing, expected a file of launch/configs'
    [[ $launcher =~ ^(mpirun|horovodrun)$ ]] || fail "--engine: got $launcher, expected mpirun or horovodrun"
}

# One line per layout: name, nodes, ranks per node, training options.
plan_sweep() {
    local values
    values=$("$program" train --config "$config" --print train.local_batch_size --print train.global_batch_size \
        --print schedule.base_lr --print schedule.warmup_epochs) || exit 2
    mapfile -t values <<<"$values"
    "$here/.venv/bin/python" -m mlperf_rn50.study.layouts --layouts "$layouts" --scaling "$scaling" \
        --local-batch-size "${values[0]}" --global-batch-size "${values[1]}" --base-lr "${values[2]}" \
        --warmup-epochs "${values[3]}" --lr-table "$lr_table"
}

count_complete() {
    local number count=0
    for number in $(find "$run_dir" -maxdepth 1 -name 'result_*.txt' 2>/dev/null | sed -n 's/.*result_\([0-9]*\)\.txt$/\1/p'); do
        case $(run_end "$number") in
            converged | aborted) ((count += 1)) ;;
        esac
    done
    echo "$count"
}

# The runs of a layout that are still missing.
sweep_layout() { # NAME NODES RANKS TRAIN_OPTIONS...
    local name=$1 nodes=$2 per_node=$3 code where=() missing i
    shift 3
    if [ -n "$has_hosts" ]; then
        where=("$here/launch/$launcher.sh" --nodes "$nodes" --ranks-per-node "$per_node")
    else
        where=("$here/launch/local.sh" --ranks-per-node $((nodes * per_node))
            --run.submission_platform "$nodes nodes of $per_node ranks, simulated by local ranks of $(hostname)")
    fi
    missing=$((seeds - $(count_complete)))
    ((missing > 0)) || { say "$name: complete, skipped"; return 0; }
    for ((i = 0; i < missing; i++)); do
        say "$name: run $((seeds - missing + i + 1)) of $seeds"
        code=0
        run_engine "${where[@]}" --config "$config" --run-dir "$run_dir" "$@" "${rest[@]}" || code=$?
        [ -z "$asked" ] || exit 75
        case $code in
            0 | 1) [ "$code" = 0 ] || say "$name: this run did not converge" ;;
            *) say "$name: this run failed with exit code $code" ;;
        esac
        ((code <= worst)) || worst=$code
    done
}

worst=0 stop_signal=TERM
parse_sweep "$@"
plan=$(plan_sweep) || exit 2
while read -r -a line <&3; do
    run_dir=logs/$study/${line[0]}
    sweep_layout "${line[@]}"
done 3<<<"$plan"
"$program" report "logs/$study"
exit "$worst"
