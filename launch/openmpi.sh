# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # shared with common.sh
# How Open MPI starts ranks; sourced after common.sh by the launchers that use it.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# mpirun kills its ranks a second after SIGTERM, but hands SIGUSR1 on to them and waits for their checkpoint.
stop_signal=USR1
mpi_options=(--quiet --bind-to none --oversubscribe --mca mpi_yield_when_idle 1 --mca btl_vader_single_copy_mechanism none
    # A host that is cut off is noticed after 25 s of silence.
    --mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 3)

start_ranks() {
    local where=() name
    if [ ${#hosts[@]} -gt 0 ]; then
        printf -v name "%s:$ranks_per_node," "${hosts[@]}"
        where=(--host "${name%,}")
    fi
    for name in $(rank_variables); do
        where+=(-x "$name")
    done
    run_engine "$here/.venv/bin/mpirun" "${mpi_options[@]}" -np $((num_nodes * ranks_per_node)) "${where[@]}" "$@"
}
