"""What every launcher is asked for; what it does not know itself is an option of mlperf-rn50 train."""
from __future__ import annotations

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
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.parser import Parser

# Options of train that only print something: no rank is started for them.
_PRINTING = ('--dry-run', '--print')


@dataclass(frozen=True)
class Options:
    """What a launcher was asked for. None, where not said otherwise, is what the configuration says."""

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
        """Whether an option of train asks for something to be printed, and nothing else."""
        return any(word.partition('=')[0] in _PRINTING for word in self.train)


class AlreadySaid(ConfigError):
    """A mistake that another program has reported."""


def say(script: Path, text: str) -> None:
    """Print a line of a launch script for the user, who may have closed the terminal."""
    with suppress(OSError):
        print(f'launch/{script.name}: {printable(text)}', file=sys.stderr, flush=True)


def values_of(here: Path, config: str, options: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return values of a configuration, without line breaks; raise AlreadySaid where it cannot be run."""
    command = [str(here / '.venv/bin/mlperf-rn50'), 'train', '--config', config, *options,
               *(word for key in keys for word in ('--print', key))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_child, start_new_session=True)
    values = done.stdout.split('\n')[:-1]
    if done.returncode or len(values) != len(keys):
        raise AlreadySaid
    return values


def number(least: int) -> Callable[[str], int]:
    """Return the type of an option that counts something."""
    def parse(text: str) -> int:
        if not re.fullmatch(r'[0-9]{1,6}', text) or int(text) < least:
            raise ArgumentTypeError(f'got {text}, expected a number from {least}')
        return int(text)
    return parse


count = number(1)


def usage_of(script: Path) -> str:
    """What the comment at the top of a launch script says."""
    comment = takewhile(lambda line: line.startswith('#'), script.read_text().splitlines()[1:])
    return '\n'.join(line[1:].removeprefix(' ') for line in comment)


def script_parser(script: Path) -> Parser:
    """Return the parser of a launch script, whose help begins with the comment at the script's top."""
    return Parser(f'launch/{script.name}', usage_of(script), usage=SUPPRESS)


def make_parser(script: Path, has_hosts: bool, image_option: str | None) -> Parser:
    """The options of a launcher.

    Args:
        image_option: None if ranks run in no container.
    """
    parser = script_parser(script)
    own = parser.add_argument_group('options of every launcher')
    add = own.add_argument
    add('--config', metavar='FILE', help='the configuration of the run')
    add('--run-dir', metavar='DIR', help='where its files go (default: run.dir of the configuration)')
    add('--nodes', metavar='N', type=count,
        help='nodes (default: run.num_nodes of the configuration, or all hosts given, or 1)')
    add('--ranks-per-node', metavar='R', type=count,
        help='ranks on each node (default: slots=R of the hosts, or run.ranks_per_node of the configuration, or 1)')
    add('--ranks-per-device', metavar='K', type=count, default=1,
        help='K ranks share a GPU through NVIDIA MPS, or a core set without GPUs (default 1)')
    add('--seeds', metavar='N', type=count, default=1,
        help='N runs one after another, each with a fresh seed; with --resume, those in the run folder count')
    add('--clear-caches', action='store_true', help='flush the page cache of every node before each run (needs root)')
    add('--restarts', metavar='N', type=count, default=0,
        help='after a failure go on from the last checkpoint, at most N times, and while steps are gained')
    add('--elastic', action='store_true', help='with --restarts: go on with the hosts that still answer, without those '
        'that failed twice')
    add('--resume', action='store_true', help='go on with the newest run of the run folder')
    add('--no-doctor', dest='doctor', action='store_false', help='do not check the nodes first')
    if has_hosts:
        add('--hosts', metavar='h1,h2,…', action='extend', type=parse_hosts, help='hosts reached with ssh')
        add('--hostfile', dest='hosts', metavar='FILE', action='extend', type=load_hostfile,
            help='a file with one host a line, with slots=R or without')
    if image_option:
        add(image_option, dest='image', metavar='IMAGE', help='the image that every rank runs in')
    if image_option == '--container':
        add('--mount', dest='mounts', metavar='DIR', action='append',
            help='a folder that the run needs beside the current one')
    parser.set_defaults(hosts=[], image=None, mounts=[])
    parser.epilog = 'Everything else is an option of: mlperf-rn50 train'
    return parser


def join_values(parser: Parser, argv: Sequence[str]) -> list[str]:
    """The words with each of the parser's values at its option: one that begins with a dash is no option, but wrong."""
    takes_value = {name for action in parser._actions if action.nargs is None for name in action.option_strings}
    words: list[str] = []
    for word in argv:
        if words and words[-1] in takes_value:
            words[-1] += f'={word}'
        else:
            words.append(word)
    return words


def parse_options(parser: Parser, argv: Sequence[str]) -> Options:
    """What the words of a command line ask for; ConfigError where an option has no value, or a wrong one."""
    namespace, train = parser.parse_known_args(join_values(parser, argv))
    values = vars(namespace)
    if values.pop('clear_caches'):
        train += ['--run.clear_caches', 'true']
    return Options(**values, train=train)
