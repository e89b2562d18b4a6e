"""Environment of this process: its rank and size, without communication, and variables that other
programs have left, whose values are in variables.ini."""

import os
import platform
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import MutableMapping
from itertools import pairwise
from math import ceil
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import load_ini
from mlperf_rn50.system.processor import omp_threads

COMMAND = 'MLPERF_RN50_COMMAND'  # the user's command line of a launcher, quoted for a shell
# Set for each process by Open MPI, MPICH, Slurm's PMI, and horovodrun with Gloo.
RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'HOROVOD_RANK')
_SIZE = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'PMIX_SIZE', 'HOROVOD_SIZE')
_LOCAL_RANK = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'HOROVOD_LOCAL_RANK')
_LOCAL_SIZE = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS', 'HOROVOD_LOCAL_SIZE')

_FORMS = load_ini(Path(__file__).with_name('variables.ini'))
# Variables that tell a process its rank. Those of a launcher come from an outer job or an old
# shell.
_OF_RANKS = re.compile(
    r'HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|GLOO_RENDEZVOUS_|HOSTNAME|ELASTIC)|OMPI_(COMM|UNIVERSE)_|'
    r'OMPI_MCA_(ess|orte_(app_num|bound|ess_|hnp_uri|jobfam|local_daemon|num_nodes|top_session))|'
    r'PMIX?_(?!MCA_)|MPI_LOCAL'
)
_OF_GLOO = ('HOROVOD_CONTROLLER', 'HOROVOD_CPU_OPERATIONS')


def environment_number(name: str) -> int | None:
    """Return the whole number in an environment variable, None if it is not set; raise ConfigError
    for other text."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r'\s*\d{1,9}\s*', text, re.ASCII):
        raise ConfigError(f'{name}: got {text[:40]!r} in the environment, expected a whole number')
    return int(text)


def _number(names: tuple[str, ...]) -> int | None:
    return next((environment_number(n) for n in names if n in os.environ), None)


def _slurm_number(name: str) -> int | None:
    """Return a number of the Slurm step under srun --mpi=pmix, where PMIx sets only the rank;
    otherwise None."""
    return environment_number(name) if 'PMIX_RANK' in os.environ else None


def launched_size() -> int | None:
    """Return the number of ranks; None if no launcher started them."""
    size = _number(_SIZE)
    return _slurm_number('SLURM_STEP_NUM_TASKS') if size is None else size


def launched_rank() -> int:
    """Return this process's rank; 0 if no launcher started it."""
    return _number(RANK_VARIABLES) or 0


def launched_local() -> tuple[int, int]:
    """Return this process's rank on its node and the number of ranks there; (0, 1) without a
    launcher."""
    rank, size = _number(_LOCAL_RANK), _number(_LOCAL_SIZE)
    if rank is None and size is None and (num_tasks := _slurm_number('SLURM_STEP_NUM_TASKS')):
        rank = _slurm_number('SLURM_LOCALID')
        tasks = os.environ.get('SLURM_STEP_TASKS_PER_NODE', '')
        size = _tasks_on_node(tasks, _slurm_number('SLURM_NODEID') or 0)
        if not size:  # the same number on each node
            size = ceil(num_tasks / (_slurm_number('SLURM_STEP_NUM_NODES') or 1))
    rank = rank or 0
    size = size or 1
    if rank >= size:
        raise ConfigError(
            f'rank on this node: got {rank} with {size} ranks, expected at most {size - 1}, from '
            'the environment of the launcher; start the ranks with a script in launch/'
        )
    return rank, size


def _tasks_on_node(text: str, node: int) -> int:
    """Return a node's number of tasks from Slurm's list, such as 4(x2),3 for 4, 4 and 3; 0 if it
    is not listed."""
    for tasks, repeats in re.findall(r'(\d{1,9})(?:\(x(\d{1,9})\))?', text, re.ASCII):
        node -= int(repeats or 1)
        if node < 0:
            return int(tasks)
    return 0


def resume_command(checkpoints: Path, is_newest: bool = True) -> str:
    """Return the command line that resumes a run; is_newest: whether it is the one that the
    launcher would resume."""
    typed = os.environ.get(COMMAND)
    if not typed:
        arguments = [word for word in sys.argv[1:] if word != '--debug']
        typed = shlex.join(['mlperf-rn50', 'train', *arguments[1:]])
        if num_ranks := os.environ.get('OMPI_COMM_WORLD_SIZE'):  # of mpirun without a launcher
            typed = f'mpirun -np {num_ranks} {typed}'
    words = [word for word in shlex.split(typed) if word != '--debug']  # of mlperf-rn50
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--resume', nargs='?', const='')
    for i, (program, command) in enumerate(pairwise(words), 2):
        if os.path.basename(program) == 'mlperf-rn50' and command == 'train':
            given, others = parser.parse_known_args(words[i:])
            if given.resume is None:  # the run folder has the configuration
                others = [word for word in others if word == '--elastic']
            return shlex.join([*words[:i], '--resume', str(checkpoints), *others])

    # the command of a launcher
    if is_newest:
        given, others = parser.parse_known_args(words)
        path = [str(checkpoints)] if given.resume else []
        return shlex.join([*others, '--resume', *path])
    num_local = launched_local()[1]
    hosts = ['--hosts', 'HOSTS'] if num_local < (launched_size() or 1) else []
    start = ['launch/ranks.sh', *hosts, str(num_local), 'mlperf-rn50', 'train']
    return shlex.join([*start, '--resume', str(checkpoints)])


def rank_name() -> str:
    """Return the name of this process for a message, such as 'rank 2 on h3'."""
    return f'rank {launched_rank()} on {platform.node()}'


def print_stderr(line: str) -> None:
    """Write a line to stderr in a single write, so that lines of ranks do not mix; unbuffered
    print() writes twice."""
    if sys.stderr:  # None if stderr was closed at the start
        sys.stderr.write(f'{line}\n')
        sys.stderr.flush()


def settle_variables(env: MutableMapping[str, str], starts_ranks: bool = False) -> None:
    """Correct an environment before it is used; raise ConfigError for a value that a library would
    not survive.

    OMP_NUM_THREADS becomes one number, because MXNet reads no list; without a number, it and empty
    variables are removed. Horovod's controller is the one of the program that started this rank.

    Args:
        starts_ranks: True for a launcher, whose ranks get their own variables.
    """
    for expected in _FORMS.sections():
        for name in _FORMS[expected]['names'].split():
            text = env.get(name, '').strip()
            _set(env, name, text)
            if text and not re.fullmatch(_FORMS[expected]['pattern'], text, re.ASCII):
                raise ConfigError(
                    f'{name}: got {text[:40]!r} in the environment, expected {expected}; correct '
                    'or unset it'
                )
    _set(env, 'OMP_NUM_THREADS', str(omp_threads(env.get('OMP_NUM_THREADS', '')) or ''))
    for name in [n for n in env if starts_ranks and _OF_RANKS.match(n)]:
        del env[name]
    has_mpi = 'OMPI_COMM_WORLD_RANK' in env or 'PMIX_RANK' in env
    is_gloo = 'HOROVOD_GLOO_RENDEZVOUS_ADDR' in env and not has_mpi
    for name in _OF_GLOO:
        if not is_gloo and env.get(name, '').lower() != 'ccl':
            env.pop(name, None)


def _set(env: MutableMapping[str, str], name: str, text: str) -> None:
    """Set a variable, or remove it if the text is empty; a correct one stays untouched."""
    if not text:
        env.pop(name, None)
    elif env.get(name) != text:
        env[name] = text
