"""Launchers: their options, parsed with the standard library only, and the engines that start their
ranks, with the command line and environment of every rank."""

import os
import shlex
import shutil
import subprocess
from argparse import REMAINDER
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.hosts import Host, load_hostfile, parse_host, parse_hosts
from mlperf_rn50.parser import (
    DRILL_FORM,
    Drill,
    Parser,
    filled,
    option_adder,
    parse_drill,
    whole_number,
)
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE
from mlperf_rn50.system.launcher_env import COMMAND, print_stderr
from mlperf_rn50.system.mpi_session import tmp_dir
from mlperf_rn50.text import printable

CHECKOUT = Path(__file__).parents[2]
PRINTING = ('--dry-run', '--print', '--print-config')  # options with which train starts no ranks
COUNT = whole_number(1)  # type of an option
SCONTROL_S = 60  # time limit for scontrol
_IN_IMAGE = ('/opt/mlperf_rn50/launch/bind.sh', '/opt/mlperf_rn50/.venv/bin/mlperf-rn50')


@dataclass(frozen=True)
class Options:
    """Parsed options of a launcher; None leaves a value to the configuration.

    resume: True for the newest run of the folder, or a checkpoint or folder of checkpoints of
    `run`. command: the command line as typed.
    """

    config: str | None
    run_dir: str | None
    nodes: int | None
    ranks_per_node: int | None
    ranks_per_device: int | None
    seeds: int
    restarts: int
    elastic: bool
    resume: bool | str
    drill: Drill | None
    doctor: bool
    hosts: Sequence[Host]
    image: str | None
    mounts: Sequence[str]
    train: Sequence[str]
    command: str
    run: RunFolder | None = None
    is_requeued: bool = False  # whether this is a further start of a requeued Slurm job

    @property
    def only_prints(self) -> bool:
        """True if the options only print values, without starting a run."""
        return any(word.partition('=')[0] in PRINTING for word in self.train)

    @property
    def as_train(self) -> list[str]:
        """These options as a command line of train."""
        resumed = self.run_dir if self.resume is True else self.resume
        values = {
            '--config': self.config,
            '--resume': None if self.config else resumed,  # it has its own configuration
            '--run.dir': self.run_dir,
            '--run.num_nodes': self.nodes,
            '--run.ranks_per_node': self.ranks_per_node,
            '--run.ranks_per_device': self.ranks_per_device,
        }
        given = [f'{name}={value}' for name, value in values.items() if value]
        elastic = ['--elastic'] if self.elastic and self.resume else []
        return [*given, *elastic, *self.train]


def announce(command: str, text: str) -> None:
    """Print a message of a command, such as 'launch mpirun', to stderr."""
    with suppress(OSError):  # the terminal may be closed
        print_stderr(f'mlperf-rn50 {command}: {printable(text)}')


def launch_parser(name: str, description: str, has_hosts: bool, image_option: str | None) -> Parser:
    """Return the parser of a launcher; image_option is None if ranks do not run in a container."""
    parser = Parser(
        f'mlperf-rn50 launch {name}',
        description,
        'All other options, such as --dry-run, are passed to: mlperf-rn50 train',
    )
    add = option_adder(parser)
    add('--config FILE', 'configuration of the run', type=filled)
    add('--run-dir DIR', 'run folder (default: run.dir of the configuration)', type=filled)
    add(
        '--nodes N',
        'number of nodes (default: run.num_nodes of the configuration, or all hosts given, or 1)',
        type=COUNT,
    )
    add(
        '--ranks-per-node R',
        'ranks on each node (default: R given with the hosts, or run.ranks_per_node of the '
        'configuration, or 1)',
        type=COUNT,
    )
    add(
        '--ranks-per-device K',
        'let K ranks share a GPU through NVIDIA MPS or, without GPUs, a set of cores (default: '
        'run.ranks_per_device of the configuration)',
        type=COUNT,
    )
    add(
        '--seeds N',
        'N consecutive runs, each with a fresh seed; with --resume, N includes finished runs in '
        'the run folder',
        type=COUNT,
        default=1,
    )
    add(
        '--clear-caches',
        'flush the page cache of every node before each run (needs root)',
    )
    add(
        '--restarts N',
        'after a failure, resume from the last checkpoint, at most N times, while restarts make '
        'progress',
        type=COUNT,
        default=0,
    )
    add(
        '--elastic',
        'with --restarts: resume on the hosts that answer within 30 s, without those that failed '
        'twice; take hosts back that answer again',
    )
    add(
        '--resume PATH',
        'resume the newest run in the run folder, or the run of PATH, such as '
        'logs/run/checkpoints_1 (a folder of checkpoints or one checkpoint)',
        nargs='?',
        const=True,
        default=False,
    )
    add(
        f'--drill {DRILL_FORM}',
        'cause a fault in the first start of the ranks, such as kill:rank3@step200 (also stop, '
        'hang, link, full-disk), and report what it cost',
        type=parse_drill,
    )
    add('--no-doctor', 'do not check the nodes first', dest='doctor', action='store_false')
    if has_hosts:
        add('--hosts h1,h2,...', 'hosts over ssh, or h1:R,...', type=parse_hosts, action='extend')
        add(
            '--hostfile FILE',
            'file with one host per line, optionally with slots=R',
            dest='hosts',
            type=load_hostfile,
            action='extend',
        )
    if image_option:
        add(f'{image_option} IMAGE', 'container image of every rank', dest='image', type=filled)
        add(
            '--mount DIR',
            'folder to mount in addition to the current one',
            dest='mounts',
            action='append',
        )
    parser.set_defaults(hosts=[], image=None, mounts=[])
    return parser


def ranks_parser() -> Parser:
    """Return the parser of mlperf-rn50 launch ranks."""
    parser = Parser(
        'mlperf-rn50 launch ranks',
        'Start a program with ranks here or on hosts over ssh, without checks',
    )
    add = option_adder(parser)
    add('--hosts h1,h2,...', 'hosts over ssh', type=parse_hosts, default=[])
    add('ranks_per_node RANKS', 'number of ranks, on each host', type=COUNT)
    add('program PROGRAM', 'program of every rank')
    words = add('words ARGUMENTS', 'arguments of the program', nargs=REMAINDER)
    words.required = False
    return parser


def parse_arguments(parser: Parser, argv: Sequence[str]) -> Options:
    """Parse a command line; raise ConfigError for a missing or invalid value."""
    namespace, train = parser.parse_known_args(argv)
    values = vars(namespace)
    if values.pop('clear_caches'):
        train += ['--run.clear_caches', 'true']
    return Options(
        **values,
        train=train,
        command=os.environ.get(COMMAND) or shlex.join([*parser.prog.split(), *argv]),
    )


def _program_here(options: Options, folder: str) -> list[str]:
    return [str(CHECKOUT / 'launch/bind.sh'), str(CHECKOUT / '.venv/bin/mlperf-rn50')]


def _program_in_apptainer(options: Options, folder: str) -> list[str]:
    image = options.image
    if not image:
        raise ConfigError('--image: got nothing, expected an Apptainer image')
    if not Path(image).exists():
        raise ConfigError(
            f'--image: {image} does not exist; build it with: apptainer build {image} '
            'docker-daemon:mlperf_rn50:cpu'
        )
    command = ['apptainer', 'exec']
    # hosts may have GPUs where this machine has none; without a driver, --nv only prints a note
    if options.hosts or shutil.which('nvidia-smi'):
        command.append('--nv')
    folders = [folder, str(CHECKOUT), *(_mount(m, not options.hosts) for m in options.mounts)]
    temporary = os.path.abspath(tmp_dir())
    if not Path(temporary).is_relative_to('/tmp'):  # which Apptainer itself binds
        folders.append(temporary)
    binds = [word for path in folders for word in ('--bind', path)]
    return [*command, *binds, '--pwd', folder, image, *_IN_IMAGE]


def _mount(folder: str, is_here: bool = True) -> str:
    """Return a checked path to mount; is_here: whether this machine has it."""
    path = os.path.abspath(folder)  # the data are looked for there, also if this is a link
    if is_here and not os.path.isdir(path):
        raise ConfigError(f'--mount: got {folder}, expected a folder')
    if set(path) & {',', ':'}:
        raise ConfigError(
            f'--mount: got {folder}, expected a path without commas and colons, which separate '
            'mounts'
        )
    return path


def _program_of_slurm(options: Options, folder: str) -> list[str]:
    if not options.image:
        return _program_here(options, folder)
    folders = [folder, *map(_mount, options.mounts)]
    mounts = ','.join(f'{m}:{m}' for m in folders)
    container = ['--container-image', options.image, '--container-mounts', mounts]
    return [*container, '--container-workdir', folder, *_IN_IMAGE]


@dataclass(frozen=True)
class Engine:
    """Script in launch/engines that starts the ranks of a launcher, and the properties of both."""

    script: str
    description: str
    has_hosts: bool = False
    # whether it forwards SIGUSR1, the stop request; if not, the guards do
    forwards_stop: bool = True
    image_option: str | None = None  # None if ranks do not run in a container
    image_script: str | None = None  # script for ranks in an image, if it is a different one
    in_slurm: bool = False
    get_program: Callable[[Options, str], list[str]] = _program_here

    def make_parser(self, name: str) -> Parser:
        """Return the parser of the launcher with this name."""
        return launch_parser(name, self.description, self.has_hosts, self.image_option)

    def script_for(self, image: str | None) -> str:
        """Return the script that starts the ranks in an image, or without a container if image is
        None."""
        return self.image_script if image and self.image_script else self.script

    def program(self, options: Options) -> list[str]:
        """Return the first words of a rank's command line; raise ConfigError for a missing image,
        mount or folder."""
        try:
            return self.get_program(options, os.getcwd())
        except FileNotFoundError as e:
            raise ConfigError('the current folder has been deleted; change to another one') from e

    def check_horovod(self, image: str | None, num_ranks: int) -> None:
        """Raise ConfigError if Horovod is missing but several ranks or horovodrun need it; an image
        has its own."""
        is_needed = num_ranks > 1 or self.script == 'horovodrun.sh'
        if is_needed and not image and find_spec('horovod') is None:
            user = f'{num_ranks} ranks need' if num_ranks > 1 else 'horovodrun needs'
            raise ConfigError(
                f'Horovod is not installed, but {user} it; start one rank with launch/local.sh, '
                'or run launch/setup.sh (for GPUs with nvcc of CUDA 11 in PATH)'
            )


# mpirun and srun forward SIGUSR1 to their ranks and wait until the ranks end. mpirun kills its
# ranks at once after SIGTERM (engines/openmpi.sh). horovodrun forwards only SIGTERM, and kills the
# ranks 5 s later.
ENGINES: Mapping[str, Engine] = {
    'local': Engine('openmpi.sh', 'Train on this machine with one or more ranks'),
    'mpirun': Engine(
        'openmpi.sh', "Train on hosts over ssh with Open MPI's mpirun", has_hosts=True
    ),
    'horovodrun': Engine(
        'horovodrun.sh',
        'Train on hosts over ssh with horovodrun and Gloo, not MPI',
        has_hosts=True,
        forwards_stop=False,
    ),
    'slurm': Engine(
        'openmpi.sh',
        'Train on the nodes of a Slurm job; launch/slurm.sbatch runs this',
        image_option='--container',
        image_script='srun.sh',
        in_slurm=True,
        get_program=_program_of_slurm,
    ),
    'apptainer': Engine(
        'openmpi.sh',
        'Train with every rank in an Apptainer image, here or on hosts over ssh',
        has_hosts=True,
        image_option='--image',
        get_program=_program_in_apptainer,
    ),
}


def nodes_of_slurm_job(env: Mapping[str, str]) -> list[str]:
    """Return the nodes of the surrounding Slurm job; raise ConfigError outside one."""
    nodes = env.get('SLURM_JOB_NODELIST')
    if not nodes:
        raise ConfigError('SLURM_JOB_NODELIST is not set; submit this file with sbatch')
    is_done, text = run_scontrol('show', 'hostnames', nodes)
    if not is_done:
        raise ConfigError(f'scontrol: {text}')
    return [parse_host(name) for name in text.split()]


def slurm_name(env: Mapping[str, str]) -> str:
    """Return the name of the surrounding Slurm job, in an array that of its task only. The number
    of one task is also that of the whole array."""
    array, task = env.get('SLURM_ARRAY_JOB_ID'), env.get('SLURM_ARRAY_TASK_ID')
    return f'{array}_{task}' if array and task else env['SLURM_JOB_ID']


def run_scontrol(*words: str) -> tuple[bool, str]:
    """Run scontrol of Slurm; return whether it succeeded, and its output or the reason of the
    failure."""
    try:
        done = subprocess.run(
            ['scontrol', *words], capture_output=True, text=True, timeout=SCONTROL_S
        )
    except subprocess.TimeoutExpired:
        return False, f'no answer within {SCONTROL_S} s; see whether slurmctld runs'
    except OSError as e:
        return False, f'{e.strerror}'
    return not done.returncode, ' '.join((done.stderr if done.returncode else done.stdout).split())


def environment(options: Options, env: Mapping[str, str], job: str, device: str) -> dict[str, str]:
    """Return the environment of the engine, which forwards the variables listed by
    launch/engines/variables.sh."""
    per_device = options.ranks_per_device or 1
    # fewer page faults on batches and gradients
    result = {
        'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
        **env,
        'MLPERF_RN50_RANKS_PER_DEVICE': str(per_device),
        'MLPERF_RN50_JOB': job,
        DEVICE_VARIABLE: device,
        COMMAND: options.command,
    }
    if per_device > 1:
        # Twice an even share, so that other ranks can use what a waiting rank leaves idle. Source:
        # NVIDIA's guide to the Multi-Process Service, execution resource provisioning (100 % / 0.5
        # n).
        result.setdefault('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', str(min(100, 200 // per_device)))
    return result


def plain_output(stream: TextIO, env: Mapping[str, str]) -> dict[str, str]:
    """Return NO_COLOR for ranks unless stream is a terminal or FORCE_COLOR is set; mpirun gives
    them a terminal."""
    return {} if stream.isatty() or env.get('FORCE_COLOR') else {'NO_COLOR': '1'}
