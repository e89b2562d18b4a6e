"""Placement of the ranks on hosts, from options and configuration, and checks of this machine."""

import os
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.engines import Engine, Options, nodes_of_slurm_job
from mlperf_rn50.launch.hosts import check_ranks, common_slots, is_here
from mlperf_rn50.runfolder.locks import folder_lock
from mlperf_rn50.runfolder.names import RunFolder, newest_run
from mlperf_rn50.runfolder.records import Failure
from mlperf_rn50.system.cgroup import (
    find_limits,
    free_processes,
    processes_needed,
    read_small,
)
from mlperf_rn50.system.gpus import all_bus_ids, find_visible_gpus
from mlperf_rn50.system.mpi_session import SHARED_MEMORY, free_bytes, no_room, tmp_dir
from mlperf_rn50.text import plural

SYS = Path('/sys')
# of Open MPI, in addition to 4 per rank; with fewer, runs of 1 rank and of 4 ranks hung
_NUM_OPEN_FILES = 32
_MIN_FREE_BYTES = 16 << 20  # free space that the files of Open MPI and DALI need on this machine
_MOUNTS = Path('/proc/self/mountinfo')
_MAX_RANKS_PER_CPU = 8  # with more, a doctor takes minutes, and the machine is blocked for everyone


@dataclass(frozen=True)
class Placement:
    """Run folder, hosts and number of ranks on each; without ssh and Slurm, hosts has localhost
    once per node."""

    run_dir: Path
    hosts: tuple[str, ...]
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_node

    def name_of(self, failure: Failure) -> str:
        """Return the host of a failure under the name that the user gave, which may differ from the
        actual one."""
        if failure.rank is None or failure.rank >= self.num_ranks:
            return failure.host
        return self.hosts[failure.rank // self.ranks_per_node]

    def host_at_fault(self, failure: Failure) -> str:
        """Return the host of a failure or, for a rank that waited, that of the late rank; '' if it
        is not known."""
        if failure.late_rank is None:
            return self.name_of(failure)
        is_known = failure.late_rank >= 0
        return self.name_of(replace(failure, rank=failure.late_rank)) if is_known else ''

    def ranks_of(self, host: str) -> str:
        """Return the ranks of a host as text."""
        first = self.hosts.index(host) * self.ranks_per_node
        return ', '.join(map(str, range(first, first + self.ranks_per_node)))


def place_ranks(
    engine: Engine, options: Options, load: Callable[[Sequence[str]], Config]
) -> tuple[Placement, Config]:
    """Return the placement of the ranks and the configuration; options of the launcher override its
    values."""
    o = options
    run = None if o.config else run_to_resume(o)
    if run:
        config = load(['--config', str(run.config), *o.train])
        run_dir = run.dir
    else:
        slots = {host.slots for host in o.hosts}
        stated = slots.pop() if len(slots) == 1 else None
        config = load(replace(o, ranks_per_node=o.ranks_per_node or stated).as_train)
        run_dir = Path(config.run.dir)

    names = nodes_of_slurm_job(os.environ) if engine.in_slurm else [h.name for h in o.hosts]
    configured = config.run.num_nodes
    if run and o.hosts:  # a resumed run may have fewer hosts than before
        configured = None
    num_nodes = o.nodes or configured or len(names) or 1
    if names and len(names) < num_nodes:
        raise ConfigError(
            f'--nodes: got {num_nodes} with {len(names)} hosts, expected at least as many hosts; '
            'add hosts or lower --nodes'
        )
    used = o.hosts[:num_nodes]
    ranks_per_node = o.ranks_per_node or common_slots(used) or config.run.ranks_per_node or 1
    check_ranks(used, ranks_per_node)
    hosts = tuple(names[:num_nodes]) or ('localhost',) * num_nodes
    placement = Placement(run_dir, hosts, ranks_per_node)
    check_drill(o, placement)
    return placement, config


def check_drill(options: Options, placement: Placement) -> None:
    """Raise ConfigError if there is no rank or no connection for the requested fault."""
    drill = options.drill
    if not drill:
        return
    if drill.rank >= placement.num_ranks:
        raise ConfigError(f'--drill: got {drill}, expected a rank below {placement.num_ranks}')
    host = placement.hosts[drill.rank // placement.ranks_per_node]
    if drill.kind == 'link' and (is_here(host) or not options.hosts):
        raise ConfigError(
            f'--drill: got {drill}, whose host {host} is not reached over ssh, expected a rank of '
            'another host of --hosts'
        )


def run_to_resume(options: Options) -> RunFolder:
    """Return the run to resume without --config; raise ConfigError if there is none."""
    if not options.resume:
        raise ConfigError('--config: got nothing, expected a file from launch/configs')
    if not options.run_dir:
        raise ConfigError('--resume: got no --run-dir, expected the folder of the run to resume')
    folder = Path(options.run_dir)
    if run := options.run or newest_run(folder):
        return run
    with folder_lock(folder):  # another launcher may be starting the run
        raise ConfigError(
            f'--resume: got no run in {options.run_dir}, expected one; start it with --config'
        )


def check_machine(engine: Engine, options: Options, placement: Placement, config: Config) -> None:
    """Raise ConfigError if this machine cannot bear its ranks."""
    num_here = (
        0 if engine.in_slurm else sum(map(is_here, placement.hosts)) * placement.ranks_per_node
    )
    check_kept(placement.run_dir)
    # Slurm gives the limits of this process to those of each node; ssh does not
    check_room(engine, placement.ranks_per_node if engine.in_slurm else num_here)
    found = ''
    num_cores = len(os.sched_getaffinity(0))
    num_cpus = ceil(min(num_cores, find_limits().quota_cpus or num_cores))
    if num_here > _MAX_RANKS_PER_CPU * num_cpus:
        found = f'{plural(num_cpus, "CPU")}, expected at most {_MAX_RANKS_PER_CPU} ranks per CPU'
    needed = ceil(num_here / (options.ranks_per_device or config.run.ranks_per_device))
    # for one, the doctor knows why a GPU is not found
    if config.train.device == 'gpu' and needed > 1:
        num_gpus = max(len(all_bus_ids(SYS)), len(find_visible_gpus()))
        if num_gpus < needed:
            found = f'{plural(num_gpus, "GPU")}, expected {needed}'
    if found:
        raise ConfigError(
            f'--nodes, --ranks-per-node: got {plural(len(placement.hosts), "node")} with '
            f'{plural(placement.ranks_per_node, "rank")}, {num_here} on this machine, which has '
            f'{found}; give other machines with --hosts of launch/mpirun.sh, or lower the numbers'
        )


def check_kept(run_dir: Path) -> None:
    """Raise ConfigError if the run folder is in the container of launch/docker.sh, which is removed
    at its end."""
    if 'MLPERF_RN50_IMAGE' not in os.environ:
        return
    # the fifth word of each line, with octal numbers for white space; source: proc(5)
    words = (line.split()[4] for line in read_small(_MOUNTS).splitlines())
    points = {re.sub(r'\\(\d{3})', lambda m: chr(int(m[1], 8)), word) for word in words}
    path = run_dir.resolve()
    if points.isdisjoint(map(str, (path, *path.parents[:-1]))):
        raise ConfigError(
            f'--run-dir: got {run_dir}, expected a folder in the current one or in one of --mount; '
            'it would be lost with the container'
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
    ranks = f'{plural(num_ranks, "rank")} on a node'
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _NUM_OPEN_FILES + 4 * num_ranks
    if 0 <= limit < needed:
        raise ConfigError(
            f'ulimit -n: got {limit} open files, expected at least {needed}, which Open MPI needs '
            f'for {ranks}; run ulimit -n {needed} before the launcher'
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit < _MIN_FREE_BYTES:
        raise ConfigError(
            f'ulimit -f: got {limit >> 10} KiB per file, expected at least '
            f'{_MIN_FREE_BYTES >> 10}, for the shared memory of Open MPI; run ulimit -f unlimited '
            'before the launcher'
        )
    left = free_processes()
    needed = processes_needed(num_ranks)
    if left and left[0] < needed:
        raise ConfigError(
            f'processes: {left[1]}, of which {left[0]} are free, expected {needed} for {ranks}; '
            'raise the limit'
        )
    for folder, name in ((tmp_dir(), 'TMPDIR'), (SHARED_MEMORY, str(SHARED_MEMORY))):
        free = free_bytes(folder)
        if free is not None and free < _MIN_FREE_BYTES:
            raise ConfigError(no_room(name, folder, free, _MIN_FREE_BYTES))
