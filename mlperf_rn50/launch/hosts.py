"""Hosts reached with ssh: parsing, slots and reachability."""

import platform
import re
import shlex
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import read_text
from mlperf_rn50.launch.helpers import (
    kill_session,
    memory_file,
    start_helper,
    text_of,
    wait_briefly,
)
from mlperf_rn50.system.signals import SignalQueue

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')
_SSH = 'ssh -n -o BatchMode=yes -o ConnectTimeout=5'.split()
_SSH_LIMIT_S = 10
_HAS_CHECKOUT = f'test -e {shlex.quote(__file__)}'
_MAX_BYTES = 1 << 20  # maximum size of a hostfile
_ANY = range(1, 10**6)  # numbers of ranks
# Word of a line in a hostfile of Open MPI, in which cpu and count mean slots.
_WORD = re.compile(r'(?:slots|cpu|count|(max[_-]slots|slots[_-]max))=([1-9][0-9]{0,5})')
_MAX_CONNECTIONS = 64  # maximum number of simultaneous ssh connections
RETEST_S = 30.0  # between two tests whether excluded hosts answer again


@dataclass(frozen=True)
class Host:
    """A host name as the user gave it, the number of ranks on the host (None if not given), and the
    allowed numbers."""

    name: str
    slots: int | None = None
    allowed: range = _ANY


def parse_host(name: str) -> str:
    """Check a host name or an IPv4 address and return it; raise ConfigError for anything else."""
    if '@' in name:
        raise ConfigError(
            f'host: got {name}, expected a host name or an address; set the user in ~/.ssh/config'
        )
    if ':' in name:
        raise ConfigError(
            f'host: got {name}, expected a host name or an IPv4 address, or NAME:RANKS; give an '
            'IPv6 address a name in /etc/hosts, and set ports in ~/.ssh/config'
        )
    if not _NAME.fullmatch(name):
        shown = name if name and name.isprintable() else repr(name)
        message = f'host: got {shown}, expected a host name or an address'
        if '[' in name:
            message += f"; list the hosts of a range with scontrol show hostnames '{shown}'"
        raise ConfigError(message)
    return name


def _parse_host_and_ranks(word: str) -> Host:
    """Parse 'h1', or 'h1:4' for a host with exactly 4 ranks."""
    m = re.fullmatch(r'([^:]+):([1-9][0-9]{0,5})', word)
    if not m:
        return Host(parse_host(word))
    slots = int(m[2])
    return Host(parse_host(m[1]), slots, allowed=range(slots, slots + 1))


def parse_hosts(text: str) -> list[Host]:
    """Parse 'h1,h2' or 'h1:4,h2:4'; raise ConfigError for an empty list, an invalid host name or a
    duplicate."""
    # not at a comma within brackets
    words = re.split(r',(?![^\[]*\])', text) if text.strip() else []
    hosts = [_parse_host_and_ranks(word.strip()) for word in words]
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f'--hosts: got {name} twice, expected each host once; set its number of ranks with '
                '--ranks-per-node'
            )
    if not names:
        raise ConfigError('--hosts: got nothing, expected host names such as h1,h2')
    return hosts


def parse_hostfile(text: str, where: str) -> list[Host]:
    """Parse one host per line, optionally with slots=N; the slots of a host on several lines add
    up, as with PBS."""
    hosts = defaultdict(list)
    for line in text.splitlines():
        words = re.sub(r'\s*=\s*', '=', line.partition('#')[0]).split()
        if not words:
            continue
        host = _parse_host_and_ranks(words[0])
        for word in words[1:]:
            m = _WORD.fullmatch(word)
            if not m or host.slots and not m[1]:
                raise ConfigError(
                    f'--hostfile: {where}: got {word!a} in {line.strip()!a}, expected a host with '
                    'slots=N, N of 1 or more; set ports in ~/.ssh/config, and remove other words'
                )
            number = int(m[2])
            if m[1]:
                host = replace(host, allowed=range(1, number + 1))
            else:
                host = replace(host, slots=number)
        hosts[host.name].append(host)
    if not hosts:
        raise ConfigError(f'--hostfile: {where}: got no host, expected one per line')
    return [
        same[0] if len(same) == 1 else Host(name, sum(h.slots or 1 for h in same))
        for name, same in hosts.items()
    ]


def load_hostfile(path: str) -> list[Host]:
    """Read and parse a hostfile; raise ConfigError if it is unreadable or invalid."""
    try:
        return parse_hostfile(read_text(Path(path), _MAX_BYTES), path)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f'--hostfile: cannot read {path}: {getattr(e, "strerror", None) or "not a text file"}'
        ) from e


def common_slots(hosts: Sequence[Host]) -> int | None:
    """Return the number of slots on each host; None if no host states it. Raise ConfigError if the
    numbers differ."""
    by_slots = {h.slots: h for h in reversed(hosts)}  # the first host of each number
    if len(by_slots) > 1:
        first, other = sorted(by_slots.values(), key=lambda h: h.slots or 0)[:2]
        is_fixed = any(len(host.allowed) == 1 for host in hosts)  # NAME:RANKS
        advice = 'correct the numbers' if is_fixed else 'set --ranks-per-node'
        raise ConfigError(
            f'hosts: got slots={first.slots or "(none)"} for {first.name} and slots={other.slots} '
            f'for {other.name}, expected the same number on each host; {advice}'
        )
    return hosts[0].slots if hosts else None


def check_ranks(
    hosts: Sequence[Host], ranks_per_node: int, option: str = '--ranks-per-node'
) -> None:
    """Raise ConfigError if a host does not allow this number of ranks, which the option sets."""
    for host in hosts:
        if ranks_per_node not in host.allowed:
            most = 'at most ' if len(host.allowed) > 1 else ''
            raise ConfigError(
                f'{host.name}: got {ranks_per_node} ranks, expected {most}{host.allowed[-1]} as '
                f'given with the host; change that or {option}'
            )


def is_here(name: str) -> bool:
    """Return whether a host is this machine, which needs no ssh."""
    this_host = platform.node()
    return name in ('localhost', '127.0.0.1', this_host, this_host.partition('.')[0])


def silent_hosts(names: Sequence[str], signals: SignalQueue) -> dict[str, str]:
    """Return the unreachable hosts with ssh's reasons, if any; none after a stop request, which
    ends the search."""
    silent: dict[str, str] = {}
    others = [name for name in names if not is_here(name)]
    if not shutil.which('ssh'):
        return dict.fromkeys(others, 'ssh: not found')
    for first in range(0, len(others), _MAX_CONNECTIONS):
        if signals.is_requested:
            break
        part = others[first : first + _MAX_CONNECTIONS]
        with ExitStack() as stack:
            outputs = [stack.enter_context(memory_file()) for _ in part]
            processes = [
                start_helper([*_SSH, name, 'true'], stdout=DEVNULL, stderr=output)
                for name, output in zip(part, outputs)
            ]
            wait_briefly(processes, signals, _SSH_LIMIT_S)
            for name, process, output in zip(part, processes, outputs):
                if process.returncode != 0:
                    silent[name] = ''.join(text_of(output).splitlines()[-1:])
    return {} if signals.is_requested else silent


class ReturnTests:
    """Tests over ssh, in the background, whether excluded hosts answer again.

    The hosts that answer have returned once one of them has answered twice in a row: a failing link
    does not stop the run again and again, and guards have time to end the ranks of an earlier job.
    The test looks for a file of the checkout, because a host may answer before it has its disks.
    """

    def __init__(self) -> None:
        self._tests: dict[str, subprocess.Popen] = {}
        self._answered: set[str] = set()
        self._next_s = 0.0

    def returned(self, names: Sequence[str]) -> set[str]:
        """Return those of the hosts that have returned, if any; start their next test when it is
        due. Never waits."""
        found: set[str] = set()
        running = [test for test in self._tests.values() if test.poll() is None]
        if self._tests and not running:
            answered = {name for name, test in self._tests.items() if not test.returncode}
            self._tests.clear()
            if answered & self._answered:
                found = answered.intersection(names)
            self._answered = answered - found
        now = time.monotonic()
        if now < self._next_s:
            return found
        self._next_s = now + RETEST_S
        for test in running:  # its login hangs
            kill_session(test)
        if not running:
            for name in names:
                command = [*_SSH, name, _HAS_CHECKOUT]
                with suppress(OSError):  # no process can be started now
                    self._tests[name] = start_helper(command, stdout=DEVNULL, stderr=DEVNULL)
        return found
