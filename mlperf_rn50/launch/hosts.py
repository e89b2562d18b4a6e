"""Hosts reached with ssh: which ones were named, how many ranks each takes, and which answer."""
import platform
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import read_text

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')
_ASK_LIMIT_S = 10
_MAX_BYTES = 1 << 20  # of a hostfile
_MAX_ASKED_AT_ONCE = 64


@dataclass(frozen=True)
class Host:
    """A host as it was named, and how many ranks it has room for; None where that was not said."""

    name: str
    slots: int | None = None


def parse_host(name: str) -> str:
    """A host name or an IPv4 address.

    Raises:
        ConfigError: it is something else.
    """
    if '@' in name:
        raise ConfigError(f'host: got {name}, expected a host name or an address; name the user in ~/.ssh/config')
    if ':' in name:
        raise ConfigError(f'host: got {name}, expected a host name or an IPv4 address; give an IPv6 address a name in '
                          '/etc/hosts')
    if not _NAME.fullmatch(name):
        raise ConfigError(f'host: got {name!r}, expected a host name or an address' if not name.isprintable()
                          or not name else f'host: got {name}, expected a host name or an address')
    return name


def parse_hosts(text: str) -> list[Host]:
    """The hosts of 'h1,h2'.

    Raises:
        ConfigError: there is none, one is no host name, or one comes twice.
    """
    names = [parse_host(word.strip()) for word in text.split(',')] if text.strip() else []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'--hosts: {name} is named twice; --ranks-per-node says how many ranks it has')
    if not names:
        raise ConfigError('--hosts: got nothing, expected host names such as h1,h2')
    return [Host(name) for name in names]


def parse_hostfile(text: str, where: str) -> list[Host]:
    """The hosts of a file: one a line, with slots=N or not; a host of several lines has so many slots, as with PBS.

    Raises:
        ConfigError: there is none, or a line is something else.
    """
    found: dict[str, list[int | None]] = {}
    for line in text.splitlines():
        words = line.partition('#')[0].split()
        if not words:
            continue
        slots = [word.partition('=')[2] for word in words[1:] if word.startswith('slots=')]
        if slots and not re.fullmatch(r'[1-9]\d{0,5}', slots[-1]):
            raise ConfigError(f'--hostfile: {where}: got {line.strip()!r}, expected slots=N with a number from 1')
        found.setdefault(parse_host(words[0]), []).append(int(slots[-1]) if slots else None)
    if not found:
        raise ConfigError(f'--hostfile: {where}: no host in it; expected one a line')
    return [Host(name, _slots(counts)) for name, counts in found.items()]


def _slots(counts: Sequence[int | None]) -> int | None:
    if len(counts) == 1:
        return counts[0]
    return sum(c or 1 for c in counts)


def load_hostfile(path: str) -> list[Host]:
    """The hosts of a file.

    Raises:
        ConfigError: it cannot be read or used.
    """
    try:
        return parse_hostfile(read_text(Path(path), _MAX_BYTES), path)
    except (OSError, ValueError) as e:
        raise ConfigError(f'--hostfile: cannot read {path}: {getattr(e, "strerror", None) or "not a text file"}') from e


def common_slots(hosts: Sequence[Host]) -> int | None:
    """How many ranks every host takes, by its slots; None where none says so.

    Raises:
        ConfigError: they differ.
    """
    said = {h.slots for h in hosts if h.slots is not None}
    if len(said) > 1:
        first, other = (next(h for h in hosts if h.slots == n) for n in sorted(said)[:2])
        raise ConfigError(f'--hostfile: got slots={first.slots} for {first.name} and slots={other.slots} for '
                          f'{other.name}, expected as many ranks on each; give --ranks-per-node')
    return said.pop() if said else None


def is_here(name: str) -> bool:
    """Whether a host is this machine, which needs no ssh."""
    own = platform.node()
    return name in ('localhost', '127.0.0.1', own, own.partition('.')[0])


def _answers(name: str) -> bool:
    command = ['ssh', '-n', '-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5', name, 'true']
    try:
        return is_here(name) or subprocess.run(command, capture_output=True, timeout=_ASK_LIMIT_S).returncode == 0
    except (subprocess.TimeoutExpired, OSError):
        return False


def silent_hosts(names: Sequence[str]) -> list[str]:
    """The hosts that cannot be reached, in their order."""
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _MAX_ASKED_AT_ONCE)) as pool:
        return [name for name, answers in zip(names, pool.map(_answers, names)) if not answers]
