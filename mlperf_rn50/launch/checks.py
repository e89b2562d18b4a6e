"""Checks before a launch: options, configuration, hosts and this machine."""

import os
import resource
import shutil
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.arguments import Options
from mlperf_rn50.launch.engines import Engine, nodes_of_slurm_job
from mlperf_rn50.launch.hosts import check_ranks, common_slots, is_here
from mlperf_rn50.launch.supervisor import Placement
from mlperf_rn50.runfolder.locks import folder_lock
from mlperf_rn50.runfolder.names import newest_run
from mlperf_rn50.system.cgroup import find_limits, free_processes, processes_needed
from mlperf_rn50.system.gpus import all_bus_ids, find_visible_gpus
from mlperf_rn50.system.mpi_session import SHARED_MEMORY, no_room, tmp_dir
from mlperf_rn50.text import plural

SYS = Path('/sys')
# of Open MPI, in addition to 4 per rank; with fewer, runs of 1 rank and of 4 ranks hung
_NUM_OPEN_FILES = 32
_MIN_FREE_BYTES = 16 << 20  # free space that the files of Open MPI and DALI need on this machine
_MAX_RANKS_PER_CPU = 8  # with more, a doctor takes minutes, and the machine is blocked for everyone


def place_ranks(
    engine: Engine, options: Options, load: Callable[[Sequence[str]], Config]
) -> tuple[Placement, Config]:
    """Return the placement of the ranks and the configuration; options of the launcher override its
    values."""
    o = options
    if not o.config and not o.resume:
        raise ConfigError('--config: got nothing, expected a file from launch/configs')
    if not o.config and not o.run_dir:
        raise ConfigError('--resume: got no --run-dir, expected the folder of the run to resume')
    folder = Path(o.run_dir or '')
    run = None if o.config else o.run or newest_run(folder)
    if not o.config and not run:
        with folder_lock(folder):  # another launcher may be starting the run
            raise ConfigError(
                f'--resume: got no run in {o.run_dir}, expected one; start it with --config'
            )
    config = load(['--config', str(run.config), *o.train] if run else o.as_train)
    names = nodes_of_slurm_job(os.environ) if engine.in_slurm else [h.name for h in o.hosts]
    is_free = run and o.hosts  # a resumed run may have fewer hosts than before
    num_nodes = o.nodes or (None if is_free else config.run.num_nodes) or len(names) or 1
    if names and len(names) < num_nodes:
        raise ConfigError(
            f'--nodes: got {num_nodes} with {len(names)} hosts, expected at least as many hosts; '
            'add hosts or lower --nodes'
        )
    ranks_per_node = (
        o.ranks_per_node or common_slots(o.hosts[:num_nodes]) or config.run.ranks_per_node or 1
    )
    check_ranks(o.hosts[:num_nodes], ranks_per_node)
    hosts = tuple(names[:num_nodes]) or ('localhost',) * num_nodes
    return Placement(Path(run.dir if run else config.run.dir), hosts, ranks_per_node), config


def check_machine(engine: Engine, options: Options, place: Placement, config: Config) -> None:
    """Raise ConfigError if this machine cannot bear its ranks."""
    num_here = 0 if engine.in_slurm else sum(map(is_here, place.hosts)) * place.ranks_per_node
    check_room(engine, num_here or place.ranks_per_node)
    found = ''
    limits, num_cpus = find_limits(), float(len(os.sched_getaffinity(0)))
    num_cpus = ceil(min(num_cpus, limits.quota_cpus or num_cpus))
    if num_here > _MAX_RANKS_PER_CPU * num_cpus:
        found = f'{plural(num_cpus, "CPU")}, expected at most {_MAX_RANKS_PER_CPU} ranks per CPU'
    num_devices = -(-num_here // options.ranks_per_device)
    # for one, the doctor knows why a GPU is not found
    if config.train.device == 'gpu' and num_devices > 1:
        num_gpus = max(len(all_bus_ids(SYS)), len(find_visible_gpus()))
        if num_gpus < num_devices:
            found = f'{plural(num_gpus, "GPU")}, expected {num_devices}'
    if found:
        raise ConfigError(
            f'--nodes, --ranks-per-node: got {plural(len(place.hosts), "node")} with '
            f'{plural(place.ranks_per_node, "rank")}, {num_here} on this machine, which has '
            f'{found}; '
            'give other machines with --hosts of launch/mpirun.sh, or lower the numbers'
        )


def check_room(engine: Engine, num_ranks: int) -> None:
    """Raise ConfigError if TMPDIR is unusable, or if Open MPI would hang or abort for want of files
    or processes."""
    if not os.access(tmp_dir(), os.W_OK | os.X_OK):
        raise ConfigError(
            f'TMPDIR: {tmp_dir()} is not a writable folder; create it or set TMPDIR to another one'
        )
    if engine.script != 'openmpi.sh':
        return
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _NUM_OPEN_FILES + 4 * num_ranks
    if 0 <= limit < needed:
        raise ConfigError(
            f'ulimit -n: got {limit} open files, expected at least {needed}, which Open MPI needs '
            'for '
            f'{plural(num_ranks, "rank")} on a node; run ulimit -n {needed} before the launcher'
        )
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) < _MIN_FREE_BYTES:
        raise ConfigError(
            f'ulimit -f: got {limit >> 10} KiB per file, expected at least '
            f'{_MIN_FREE_BYTES >> 10}, '
            'for the shared memory of Open MPI; run ulimit -f unlimited before the launcher'
        )
    left, needed = free_processes(), processes_needed(num_ranks)
    if left and left[0] < needed:
        raise ConfigError(
            f'processes: {left[1]}, of which {left[0]} are free, expected {needed} for '
            f'{plural(num_ranks, "rank")} on a node; raise the limit'
        )
    for folder, name in ((tmp_dir(), 'TMPDIR'), (SHARED_MEMORY, str(SHARED_MEMORY))):
        if folder.is_dir() and (free := shutil.disk_usage(folder).free) < _MIN_FREE_BYTES:
            raise ConfigError(no_room(name, folder, free, _MIN_FREE_BYTES))
