# shellcheck shell=bash
# What every launcher shares: one contract of options, one environment, the doctor, seeds, restarts.
#
# A launcher sources this file, defines start_ranks PROGRAM..., which runs a program with $ranks_per_node ranks
# on each of the $num_nodes nodes (on "${hosts[@]}" where it takes hosts) and returns its exit code, and calls
# launch "$@". It may replace engine_option, before_start, start_guards and answering_hosts.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
me=launch/$(basename "$0")
program=$here/.venv/bin/mlperf-rn50
ranks=("$here/launch/bind.sh" "$program") # what every rank runs; containers put themselves before it
num_nodes='' ranks_per_node='' ranks_per_device=1 seeds=1 restarts=0
config='' run_dir='' has_doctor=1 is_elastic='' is_resumed='' asked='' engine='' stop_signal=USR1
hosts=() train_options=() new_run=() guards=()

IFS= read -r -d '' contract <<'EOT' || true
  --config FILE         the configuration of the run
  --run-dir DIR         where its files go (default: run.dir of the configuration)
  --nodes N             nodes (default: run.num_nodes of the configuration, or all hosts given, or 1)
  --ranks-per-node R    ranks on each node (default: run.ranks_per_node of the configuration, or 1)
  --ranks-per-device K  K ranks share a GPU through NVIDIA MPS, or a core set without GPUs (default 1)
  --seeds N             N runs one after another, each with a fresh seed (default 1)
  --clear-caches        flush the page cache of every node before each run (needs root)
  --restarts N          after a failure go on from the last checkpoint, at most N times (default 0)
  --elastic             with --restarts: go on with the hosts that still answer
  --resume              go on with the newest run of the run folder
  --no-doctor           do not check the nodes first
  Everything else is an option of: mlperf-rn50 train
EOT

say() {
    echo "$me: $*" >&2
}
fail() {
    say "$*"
    exit 2
}
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    printf 'Options of every launcher:\n%s\n' "$contract"
}
needs_count() {
    [ $# -gt 1 ] || fail "$1: a number is missing"
    [[ $2 =~ ^[0-9]{1,6}$ && $2 != 0 ]] || fail "$1: got $2, expected a number from 1"
}
needs_value() {
    [ $# -gt 1 ] || fail "$1: a value is missing"
}

# Sets num_taken to how many words it took; a launcher with options of its own replaces it.
engine_option() {
    num_taken=0
}
parse_options() {
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) usage; exit 0 ;;
            --config) needs_value "$@"; config=$2; shift ;;
            --run-dir) needs_value "$@"; run_dir=$2; shift ;;
            --nodes) needs_count "$@"; num_nodes=$2; shift ;;
            --ranks-per-node) needs_count "$@"; ranks_per_node=$2; shift ;;
            --ranks-per-device) needs_count "$@"; ranks_per_device=$2; shift ;;
            --seeds) needs_count "$@"; seeds=$2; shift ;;
            --restarts) needs_count "$@"; restarts=$2; shift ;;
            --clear-caches) train_options+=(--run.clear_caches true) ;;
            --elastic) is_elastic=1 ;;
            --resume) is_resumed=1 ;;
            --no-doctor) has_doctor='' ;;
            *)
                engine_option "$@"
                [ "$num_taken" -gt 0 ] || train_options+=("$1")
                shift $((num_taken > 0 ? num_taken - 1 : 0)) ;;
        esac
        shift
    done
}

# The layout of the run, from the options or else from the configuration, which is checked before anything starts.
settle_layout() {
    local values
    [ -n "$config" ] || [ -n "$is_resumed" ] || fail '--config: got nothing, expected a file of launch/configs'
    if [ -z "$config" ]; then
        [ -n "$run_dir" ] || fail '--resume: got no --run-dir, expected the folder of the run to go on with'
        return
    fi
    new_run=(--config "$config")
    [ -z "$run_dir" ] || new_run+=(--run.dir "$run_dir")
    values=$("$program" train "${new_run[@]}" "${train_options[@]}" --print run.dir --print run.num_nodes --print run.ranks_per_node) || exit 2
    mapfile -t values <<<"$values"
    run_dir=${values[0]}
    num_nodes=${num_nodes:-${values[1]:-}}
    ranks_per_node=${ranks_per_node:-${values[2]:-}}
}
settle_hosts() {
    num_nodes=${num_nodes:-${#hosts[@]}}
    ((num_nodes > 0)) || num_nodes=1
    ranks_per_node=${ranks_per_node:-1}
    ((${#hosts[@]} == 0 || ${#hosts[@]} >= num_nodes)) ||
        fail "--nodes: got $num_nodes and ${#hosts[@]} hosts, expected as many hosts; name more or lower --nodes"
    ((${#hosts[@]} == 0)) || hosts=("${hosts[@]:0:num_nodes}")
}

# Names of the variables that reach every rank, wherever it runs.
rank_variables() {
    compgen -e | grep -E '^(OMP_|KMP_|HOROVOD_|MXNET_|DNNL_|DALI_|NCCL_|UCX_|CUDA_|MLPERF_RN50_|GLIBC_TUNABLES$)' || true
    echo MLPERF_RN50_JOB
}
set_environment() {
    # Large pages for the allocator: fewer page faults on batches and gradients.
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
    export MLPERF_RN50_RANKS_PER_DEVICE=$ranks_per_device
    if [ "$ranks_per_device" != 1 ]; then
        export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mlperf_rn50-mps-$(id -u)}
        export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-$((100 / ranks_per_device))}
    fi
}

# Engines without hosts need no guards: their ranks see themselves that their launcher is gone.
start_guards() {
    :
}
# Runs the engine's command, and ends with it: killed launchers leave nothing behind.
run_engine() {
    local with=() code
    [ -z "$asked" ] || return 1 # asked before there was an engine to tell
    job=$$-$SRANDOM
    start_guards
    if setpriv --pdeathsig TERM true 2>/dev/null; then
        with=(setpriv --pdeathsig TERM)
    fi
    # Not exported here: the guards end whatever carries it.
    "${with[@]}" env MLPERF_RN50_JOB="$job" "$@" &
    engine=$!
    while :; do
        code=0
        wait "$engine" || code=$?
        kill -0 "$engine" 2>/dev/null || break
    done
    engine=''
    [ ${#guards[@]} -eq 0 ] || kill "${guards[@]}" 2>/dev/null || true
    guards=()
    return "$code"
}
on_stop() {
    asked=1
    [ -z "$engine" ] || kill "-$stop_signal" "$engine" 2>/dev/null || true
}
trap on_stop TERM USR1
# A host is cut off: the engine may wait for it forever.
on_lost() {
    [ -n "$engine" ] || return 0
    kill "$engine" 2>/dev/null || true
    { sleep 5; kill -KILL "$engine"; } 2>/dev/null &
}
trap on_lost USR2

# Number of the newest run in the run folder, -1 for none.
newest_run() {
    find "$run_dir" -maxdepth 1 -name 'result_*.txt' 2>/dev/null |
        sed -n 's/.*result_\([0-9]*\)\.txt$/\1/p' | sort -n | tail -n 1 | grep . || echo -1
}
# A file of a run: run_file metrics 2 .jsonl
run_file() {
    local number=''
    [ "$2" = 0 ] || number=_$2
    echo "$run_dir/$1$number$3"
}
# How a run ended by its own account: converged, aborted, interrupted or failed; nothing if it was cut short.
run_end() {
    tail -n 1 "$(run_file metrics "$1" .jsonl)" 2>/dev/null |
        sed -n 's/.*"event": "end", "status": "\([a-z]*\)".*/\1/p'
}
last_step() {
    grep -o '"step": [0-9]*' "$(run_file metrics "$1" .jsonl)" 2>/dev/null | tail -n 1 | grep -o '[0-9]*' || echo 0
}
last_phase() {
    case $(grep -oE '"(init_start|run_start|run_resumed|epoch_start|eval_start|eval_stop)"' "$run_dir/result_$1.txt" 2>/dev/null | tail -n 1) in
        '"eval_start"') echo evaluation ;;
        '"epoch_start"' | '"eval_stop"') echo training ;;
        *) echo start-up ;;
    esac
}
has_checkpoint() {
    [ -n "$(find "$(run_file checkpoints "$1" '')" -maxdepth 1 -name 'step_*' 2>/dev/null)" ]
}

# The hosts that can be reached, one a line; engines without hosts have nothing to ask.
answering_hosts() {
    :
}
# Says which hosts are silent; sets answering to the others, in their order.
probe_hosts() {
    local found host
    answering=() silent=()
    found=$(answering_hosts)
    for host in "${hosts[@]}"; do
        if grep -qxF -- "$host" <<<"$found"; then answering+=("$host"); else silent+=("$host"); fi
    done
}
# The ranks of a host, by its place in the list.
ranks_of() {
    local i
    for i in "${!hosts[@]}"; do
        [ "${hosts[i]}" != "$1" ] || seq -s ', ' $((i * ranks_per_node)) $(((i + 1) * ranks_per_node - 1))
    done
}
describe_failure() { # EXIT_CODE RUN
    local where='before a run began' host
    [ "$2" -lt 0 ] || where="last recorded: step $(last_step "$2"), $(last_phase "$2")"
    probe_hosts
    for host in "${silent[@]}"; do
        say "host $host (with rank $(ranks_of "$host")) does not answer; $where"
    done
    [ ${#silent[@]} -gt 0 ] || say "the ranks ended with exit code $1; $where"
}
# Gets ready for another attempt: waits for silent hosts, or goes on without them.
regroup() {
    local deadline=$((SECONDS + 60))
    [ ${#hosts[@]} -gt 0 ] || return 0
    while probe_hosts; [ ${#silent[@]} -gt 0 ]; do
        if [ -n "$is_elastic" ] && [ ${#answering[@]} -gt 0 ]; then
            say "going on without ${silent[*]}"
            hosts=("${answering[@]}")
            num_nodes=${#hosts[@]}
            return 0
        fi
        ((SECONDS < deadline)) || return 1
        sleep 2
    done
}

# A command of the program on every rank, with the layout it is started in.
start_program() {
    start_ranks "${ranks[@]}" "$@" --run.num_nodes "$num_nodes" --run.ranks_per_node "$ranks_per_node" \
        --run.ranks_per_device "$ranks_per_device"
}
# Every node is looked at before the run starts on it.
examine() {
    [ -z "$has_doctor" ] || start_program doctor --quiet "$@"
}
on_every_node() {
    local ranks_per_node=1
    start_ranks "$@"
}
# One run to its end, through its restarts. Exit codes: 0 converged, 1 not, 2 a mistake, 75 can be resumed.
run_to_end() {
    local attempt=0 code number before how=("${new_run[@]}")
    [ -z "$is_resumed" ] || resume_run "$(newest_run)"
    while :; do
        before=$(newest_run) code=0
        examine "${how[@]}" "${train_options[@]}" || code=$?
        [ "$code" = 0 ] || [ -n "$asked" ] || return "$code"
        [ -n "$asked" ] || start_program train "${how[@]}" "${train_options[@]}" || code=$?
        number=$(newest_run)
        [ "$number" != "$before" ] || [ "${how[0]}" = --resume ] || number=-1
        case $([ "$number" -lt 0 ] || run_end "$number") in
            converged) return 0 ;;
            aborted | failed) return 1 ;;
            interrupted) return 75 ;;
        esac
        if [ -n "$asked" ]; then
            [ "$number" -ge 0 ] && has_checkpoint "$number" && return 75
            return 1
        fi
        describe_failure "$code" "$number"
        [ "$code" != 2 ] || return 2
        ((attempt < restarts)) || return 1
        ((attempt += 1))
        regroup || { say "${silent[*]} did not come back"; return 1; }
        resume_run "$number"
        say "restart $attempt of $restarts: ${how[*]}"
    done
}
# Sets how: to go on with a run, or to begin anew where it left no checkpoint.
resume_run() {
    how=("${new_run[@]}")
    if [ "$1" -ge 0 ] && has_checkpoint "$1"; then
        how=(--resume "$(run_file checkpoints "$1" '')" ${is_elastic:+--elastic})
    elif [ -n "$is_resumed" ] && [ -z "$config" ]; then
        fail "--resume: $run_dir holds no checkpoint of its newest run; start it anew with --config"
    fi
}

# For what a launcher must have been given.
before_start() {
    :
}
launch() {
    local worst=0 code i
    parse_options "$@"
    before_start
    settle_layout
    settle_hosts
    set_environment
    for ((i = 0; i < seeds; i++)); do
        code=0
        run_to_end || code=$?
        ((code <= worst)) || worst=$code
        [ -z "$asked" ] && [ "$code" != 2 ] || break
    done
    asked='' # what follows must run all the same
    [ "$ranks_per_device" = 1 ] || on_every_node "$here/launch/mps.sh" stop
    exit "$worst"
}
