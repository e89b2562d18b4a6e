"""Under which addresses others reach this host, and through which of its network interfaces."""
import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import psutil

LOOPBACK = '127.0.0.1'


def find_interfaces() -> dict[str, list[str]]:
    """Name -> IP addresses of each network interface of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {name: [a.address.partition('%')[0] for a in found if a.family in families]
            for name, found in psutil.net_if_addrs().items()}


def resolve(host: str) -> list[str]:
    """The IP addresses of a host; none where its name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def address_towards(address: str) -> str | None:
    """This host's address on the way to another one; None where no way leads there. Nothing is sent."""
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """The interface that has an address."""
    return next((name for name, found in interfaces.items() if address in found), None)


def offered_addresses(towards: Iterable[str], own: Iterable[str]) -> list[str]:
    """Addresses of this host to be tried by others, the likeliest first: none that only this host can reach.

    Debian names its own host 127.0.1.1, so that its name is no answer.

    Args:
        towards: this host's addresses on the way to each of the others.
        own: all addresses of its interfaces.
    """
    likeliest = [address for address, _ in Counter(towards).most_common()]
    return [a for a in dict.fromkeys([*likeliest, *own]) if _is_reachable(a)]


def is_loopback(address: str) -> bool:
    """Whether only this host reaches itself at an address."""
    return ipaddress.ip_address(address).is_loopback


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)
