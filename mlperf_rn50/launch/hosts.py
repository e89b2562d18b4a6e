"""Hosts reached with ssh: parsing, slots and reachability."""
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
_SSH_LIMIT_S = 10
_MAX_BYTES = 1 << 20  # maximum size of a hostfile
_MAX_CONNECTIONS = 64  # maximum number of simultaneous ssh connections


@dataclass(frozen=True)
class Host:
    """A host name as the user gave it, and the number of ranks on the host; None if not given."""

    name: str
    slots: int | None = None


def parse_host(name: str) -> str:
    """Check a host name or an IPv4 address and return it; raise ConfigError for anything else."""
    if '@' in name:
        raise ConfigError(f'host: got {name}, expected a host name or an address; set the user in ~/.ssh/config')
    if ':' in name:
        raise ConfigError(f'host: got {name}, expected a host name or an IPv4 address; give an IPv6 address a name in '
                          '/etc/hosts')
    if not _NAME.fullmatch(name):
        shown = name if name and name.isprintable() else repr(name)
        raise ConfigError(f'host: got {shown}, expected a host name or an address')
    return name


def parse_hosts(text: str) -> list[Host]:
    """Parse 'h1,h2'; raise ConfigError for an empty list, an invalid host name or a duplicate."""
    names = [parse_host(word.strip()) for word in text.split(',')] if text.strip() else []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'--hosts: got {name} twice, expected each host once; set its number of ranks with '
                              '--ranks-per-node')
    if not names:
        raise ConfigError('--hosts: got nothing, expected host names such as h1,h2')
    return [Host(name) for name in names]


def parse_hostfile(text: str, where: str) -> list[Host]:
    """Parse one host per line, optionally with slots=N; the slots of repeated hosts add up, as with PBS."""
    slots_of: dict[str, list[int | None]] = {}
    for line in text.splitlines():
        words = line.partition('#')[0].split()
        if not words:
            continue
        slots = [word.partition('=')[2] for word in words[1:] if word.startswith('slots=')]
        if slots and not re.fullmatch(r'[1-9]\d{0,5}', slots[-1]):
            raise ConfigError(f'--hostfile: {where}: got {line.strip()!r}, expected slots=N with N of 1 or more')
        slots_of.setdefault(parse_host(words[0]), []).append(int(slots[-1]) if slots else None)
    if not slots_of:
        raise ConfigError(f'--hostfile: {where}: got no host, expected one per line')
    return [Host(name, counts[0] if len(counts) == 1 else sum(c or 1 for c in counts))
            for name, counts in slots_of.items()]


def load_hostfile(path: str) -> list[Host]:
    """Read and parse a hostfile; raise ConfigError if it is unreadable or invalid."""
    try:
        return parse_hostfile(read_text(Path(path), _MAX_BYTES), path)
    except (OSError, ValueError) as e:
        raise ConfigError(f'--hostfile: cannot read {path}: {getattr(e, "strerror", None) or "not a text file"}') from e


def common_slots(hosts: Sequence[Host]) -> int | None:
    """Return the number of slots on each host; None if no host states it. Raise ConfigError if the numbers differ."""
    counts = {h.slots for h in hosts if h.slots is not None}
    if len(counts) > 1:
        first, other = (next(h for h in hosts if h.slots == n) for n in sorted(counts)[:2])
        raise ConfigError(f'--hostfile: got slots={first.slots} for {first.name} and slots={other.slots} for '
                          f'{other.name}, expected the same number on each host; set --ranks-per-node')
    return counts.pop() if counts else None


def _is_reachable(name: str) -> bool:
    this_host = platform.node()
    if name in ('localhost', '127.0.0.1', this_host, this_host.partition('.')[0]):
        return True
    command = ['ssh', '-n', '-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5', name, 'true']
    try:
        return subprocess.run(command, capture_output=True, timeout=_SSH_LIMIT_S).returncode == 0
    except (subprocess.TimeoutExpired, OSError):
        return False


def silent_hosts(names: Sequence[str]) -> list[str]:
    """Return the unreachable hosts, in the order of the names."""
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _MAX_CONNECTIONS)) as pool:
        return [name for name, is_reachable in zip(names, pool.map(_is_reachable, names)) if not is_reachable]
