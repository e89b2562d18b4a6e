"""Options of the launchers, parsed with the standard library only; unknown ones are passed to
mlperf-rn50 train."""

import os
import re
import shlex
from argparse import REMAINDER, ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mlperf_rn50.launch.hosts import Host, load_hostfile, parse_hosts
from mlperf_rn50.parser import Parser
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.launcher_env import COMMAND, print_stderr
from mlperf_rn50.text import printable

PRINTING = ('--dry-run', '--print', '--print-config')  # options with which train starts no ranks


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
    ranks_per_device: int
    seeds: int
    restarts: int
    elastic: bool
    resume: bool | str
    doctor: bool
    hosts: Sequence[Host]
    image: str | None
    mounts: Sequence[str]
    train: Sequence[str]
    command: str
    run: RunFolder | None = None

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
            '--resume': not self.config and resumed,
            '--run.dir': self.run_dir,
            '--run.num_nodes': self.nodes,
            '--run.ranks_per_node': self.ranks_per_node,
        }
        return [*(f'{name}={value}' for name, value in values.items() if value), *self.train]


def announce(command: str, text: str) -> None:
    """Print a message of a command, such as 'launch mpirun', to stderr."""
    with suppress(OSError):  # the terminal may be closed
        print_stderr(f'mlperf-rn50 {command}: {printable(text)}')


def whole_number(least: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number with a minimum."""

    def parse(text: str) -> int:
        if not re.fullmatch(r'[0-9]{1,6}', text) or int(text) < least:
            raise ArgumentTypeError(f'got {text}, expected a whole number, {least} or more')
        return int(text)

    return parse


count = whole_number(1)


def launch_parser(name: str, description: str, has_hosts: bool, image_option: str | None) -> Parser:
    """Return the parser of a launcher; image_option is None if ranks do not run in a container."""
    parser = Parser(
        f'mlperf-rn50 launch {name}',
        description,
        'All other options, such as --dry-run, are passed to: mlperf-rn50 train',
    )
    add = parser.add_argument
    add('--config', metavar='FILE', help='configuration of the run')
    add('--run-dir', metavar='DIR', help='run folder (default: run.dir of the configuration)')
    add(
        '--nodes',
        metavar='N',
        type=count,
        help='number of nodes (default: run.num_nodes of the configuration, or all hosts given, '
        'or 1)',
    )
    add(
        '--ranks-per-node',
        metavar='R',
        type=count,
        help='ranks on each node (default: R given with the hosts, or run.ranks_per_node of the '
        'configuration, or 1)',
    )
    add(
        '--ranks-per-device',
        metavar='K',
        type=count,
        default=1,
        help='let K ranks share a GPU through NVIDIA MPS or, without GPUs, a set of cores '
        '(default 1)',
    )
    add(
        '--seeds',
        metavar='N',
        type=count,
        default=1,
        help='N consecutive runs, each with a fresh seed; with --resume, N includes finished runs '
        'in the run folder',
    )
    add(
        '--clear-caches',
        action='store_true',
        help='flush the page cache of every node before each run (needs root)',
    )
    add(
        '--restarts',
        metavar='N',
        type=count,
        default=0,
        help='after a failure, resume from the last checkpoint, at most N times, while restarts '
        'make progress',
    )
    add(
        '--elastic',
        action='store_true',
        help='with --restarts: resume on the hosts that answer within 30 s, '
        'without those that failed twice',
    )
    add(
        '--resume',
        metavar='PATH',
        nargs='?',
        const=True,
        default=False,
        help='resume the newest run in the run folder, or the run of PATH, such as '
        'logs/run/checkpoints_1 (a folder of '
        'checkpoints or one checkpoint)',
    )
    add('--no-doctor', dest='doctor', action='store_false', help='do not check the nodes first')
    if has_hosts:
        add(
            '--hosts',
            metavar='h1,h2,...',
            action='extend',
            type=parse_hosts,
            help='hosts over ssh, or h1:R,...',
        )
        add(
            '--hostfile',
            dest='hosts',
            metavar='FILE',
            action='extend',
            type=load_hostfile,
            help='file with one host per line, optionally with slots=R',
        )
    if image_option:
        add(image_option, dest='image', metavar='IMAGE', help='container image of every rank')
    if image_option == '--container':
        add(
            '--mount',
            dest='mounts',
            metavar='DIR',
            action='append',
            help='folder to mount in addition to the current one',
        )
    parser.set_defaults(hosts=[], image=None, mounts=[])
    return parser


def ranks_parser() -> Parser:
    """Return the parser of mlperf-rn50 launch ranks."""
    parser = Parser(
        'mlperf-rn50 launch ranks',
        'Start a program with ranks here or on hosts over ssh, without checks',
    )
    parser.add_argument(
        '--hosts', metavar='h1,h2,...', type=parse_hosts, default=[], help='hosts over ssh'
    )
    parser.add_argument(
        'ranks_per_node', metavar='RANKS', type=count, help='number of ranks, on each host'
    )
    parser.add_argument('program', metavar='PROGRAM', help='program of every rank')
    parser.add_argument(
        'words', metavar='ARGUMENTS', nargs=REMAINDER, help='arguments of the program'
    ).required = False
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
