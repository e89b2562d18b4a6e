"""Options of the launchers; unknown ones are passed to mlperf-rn50 train."""
import re
import subprocess
import sys
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.hosts import Host, load_hostfile, parse_hosts
from mlperf_rn50.launch.process import as_child
from mlperf_rn50.parser import Parser
from mlperf_rn50.text import printable

_PRINTING = ('--dry-run', '--print')  # options with which train starts no ranks


@dataclass(frozen=True)
class Options:
    """Parsed options of a launcher; None leaves a value to the configuration."""

    config: str | None
    run_dir: str | None
    nodes: int | None
    ranks_per_node: int | None
    ranks_per_device: int
    seeds: int
    restarts: int
    elastic: bool
    resume: bool
    doctor: bool
    hosts: Sequence[Host]
    image: str | None
    mounts: Sequence[str]
    train: Sequence[str]

    @property
    def only_prints(self) -> bool:
        """True if the options only print values, without starting a run."""
        return any(word.partition('=')[0] in _PRINTING for word in self.train)


class AlreadyReported(ConfigError):
    """An error whose message mlperf-rn50 has already printed."""


def say(script: Path, text: str) -> None:
    """Print a message of a launch script to stderr."""
    with suppress(OSError):  # the terminal may be closed
        print(f'launch/{script.name}: {printable(text)}', file=sys.stderr, flush=True)


def values_of(here: Path, config: str, options: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the values of these keys, each a single line; raise AlreadyReported if the configuration is invalid."""
    command = [str(here / '.venv/bin/mlperf-rn50'), 'train', '--config', config, *options,
               *(word for key in keys for word in ('--print', key))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_child, start_new_session=True)
    values = done.stdout.split('\n')[:-1]
    if done.returncode or len(values) != len(keys):
        raise AlreadyReported
    return values


def number(least: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number with a minimum."""
    def parse(text: str) -> int:
        if not re.fullmatch(r'[0-9]{1,6}', text) or int(text) < least:
            raise ArgumentTypeError(f'got {text}, expected a whole number, {least} or more')
        return int(text)
    return parse


count = number(1)


def usage_of(script: Path) -> str:
    """Return the comment at the top of a launch script."""
    comment = takewhile(lambda line: line.startswith('#'), script.read_text().splitlines()[1:])
    return '\n'.join(line[1:].removeprefix(' ') for line in comment)


def script_parser(script: Path) -> Parser:
    """Return the parser of a launch script, with the comment at the top of the script as help."""
    return Parser(f'launch/{script.name}', usage_of(script), usage=SUPPRESS)


def make_parser(script: Path, has_hosts: bool, image_option: str | None) -> Parser:
    """Return the parser of a launcher; image_option is None if ranks do not run in a container."""
    parser = script_parser(script)
    add = parser.add_argument_group('options of every launcher').add_argument
    add('--config', metavar='FILE', help='configuration of the run')
    add('--run-dir', metavar='DIR', help='run folder (default: run.dir of the configuration)')
    add('--nodes', metavar='N', type=count,
        help='number of nodes (default: run.num_nodes of the configuration, or all hosts given, or 1)')
    add('--ranks-per-node', metavar='R', type=count,
        help='ranks on each node (default: R given with the hosts, or run.ranks_per_node of the configuration, or 1)')
    add('--ranks-per-device', metavar='K', type=count, default=1,
        help='let K ranks share a GPU through NVIDIA MPS or, without GPUs, a set of cores (default 1)')
    add('--seeds', metavar='N', type=count, default=1,
        help='N consecutive runs, each with a fresh seed; with --resume, N includes finished runs in the run folder')
    add('--clear-caches', action='store_true', help='flush the page cache of every node before each run (needs root)')
    add('--restarts', metavar='N', type=count, default=0,
        help='after a failure, resume from the last checkpoint, at most N times, while restarts make progress')
    add('--elastic', action='store_true', help='with --restarts: resume on the hosts that answer within 30 s, '
        'without those that failed twice')
    add('--resume', action='store_true', help='resume the newest run in the run folder')
    add('--no-doctor', dest='doctor', action='store_false', help='do not check the nodes first')
    if has_hosts:
        add('--hosts', metavar='h1,h2,…', action='extend', type=parse_hosts, help='hosts reached with ssh, or h1:R,…')
        add('--hostfile', dest='hosts', metavar='FILE', action='extend', type=load_hostfile,
            help='file with one host per line, optionally with slots=R')
    if image_option:
        add(image_option, dest='image', metavar='IMAGE', help='container image of every rank')
    if image_option == '--container':
        add('--mount', dest='mounts', metavar='DIR', action='append',
            help='folder to mount in addition to the current one')
    parser.set_defaults(hosts=[], image=None, mounts=[])
    parser.epilog = 'All other options are passed to: mlperf-rn50 train'
    return parser


def join_values(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Join each option of the parser with its value, so that argparse never takes a value such as -x for an option."""
    takes_value = {name for action in parser._actions if action.nargs is None for name in action.option_strings}
    words: list[str] = []
    for word in argv:
        if words and words[-1] in takes_value:
            words[-1] += f'={word}'
        else:
            words.append(word)
    return words


def parse_options(parser: Parser, argv: Sequence[str]) -> Options:
    """Parse a command line; raise ConfigError for a missing or invalid value."""
    namespace, train = parser.parse_known_args(join_values(parser, argv))
    values = vars(namespace)
    if values.pop('clear_caches'):
        train += ['--run.clear_caches', 'true']
    return Options(**values, train=train)
