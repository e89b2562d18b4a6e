"""Where the ranks of a job meet without MPI, PMI or ssh: the store Gloo needs, and what each rank must know of it.

Slurm's srun sets the number of each rank but not the addresses of the others.
"""
import os
import platform
import select
import sys
import time
from collections.abc import Mapping, Sequence

from mlperf_rn50.errors import ConfigError, RankLost, UserError
from mlperf_rn50.system.addresses import (
    LOOPBACK,
    address_towards,
    find_interfaces,
    interface_of,
    is_loopback,
    offered_addresses,
    resolve,
)
from mlperf_rn50.system.forwarder import start_forwarder
from mlperf_rn50.system.launched import environment_number
from mlperf_rn50.system.meeting import SECRET_VARIABLE, Server, StoreHandler, knows

# ADDRESS,ADDRESS:PORT, to be tried in this order; an address or a name.
RENDEZVOUS_VARIABLE = 'MLPERF_RN50_RENDEZVOUS'
_FIND_LIMIT_S = 60.0


def offer(hosts: Sequence[str]) -> list[str]:
    """The addresses under which the hosts of a job are to look for this one, the likeliest first.

    Raises:
        UserError: this host has none that others could reach.
    """
    if len(hosts) == 1:
        return [LOOPBACK]
    towards = [own for host in hosts for address in resolve(host) if (own := address_towards(address))]
    found = offered_addresses(towards, [a for addresses in find_interfaces().values() for a in addresses])
    if not found:
        raise UserError(f'{platform.node()}: got no network interface but the loopback, expected one that leads to '
                        f'{", ".join(hosts)}')
    return found


def serve(hosts: Sequence[str], secret: str) -> None:
    """Serves until the reader of its output goes away; prints the addresses as RENDEZVOUS_VARIABLE wants them."""
    addresses = offer(hosts)
    server = Server(StoreHandler, secret, is_local=addresses == [LOOPBACK])
    server.start()
    print(f'{",".join(addresses)}:{server.port}', flush=True)
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    poller.poll()


def find_server(addresses: Sequence[str], port: int, secret: str, limit_s: float = _FIND_LIMIT_S) -> str:
    """The first address at which the server that knows the secret answers.

    Raises:
        RankLost: none does in time.
    """
    deadline = time.monotonic() + limit_s
    while True:
        for host in addresses:
            for address in resolve(host):
                if knows(address, port, secret):
                    return address
        if time.monotonic() > deadline:
            raise RankLost(f'{RENDEZVOUS_VARIABLE}: nobody who knows {SECRET_VARIABLE} answers at '
                           f'{", ".join(addresses)}, port {port}; the launcher that serves there is gone, or a '
                           'firewall is between')
        time.sleep(0.5)


def check_own_name(name: str, found: Sequence[str], address: str) -> None:
    """Raise ConfigError where Horovod would offer the others an address that only this host can reach.

    Source: Horovod 0.28.1, gloo_context.cc, InitializeForProcessSet: its sets of ranks, that of all ranks included, do
    not know HOROVOD_GLOO_IFACE; Gloo then listens at the address of the host's own name.

    Args:
        name: of this host.
        found: the addresses it has here.
        address: of the meeting point.
    """
    if not is_loopback(address) and (not found or is_loopback(found[0])):
        raise ConfigError(f'{name}: got {found[0] if found else "no address"} for the own name of this host, expected '
                          'the address at which the others reach it: Horovod listens there; set it in /etc/hosts, '
                          'where Debian has 127.0.1.1')


def place_variables(rank: int, size: int, local_rank: int, local_size: int, node: int,
                    num_nodes: int) -> dict[str, str]:
    """Who a rank is, as Horovod reads it."""
    numbers = {'RANK': rank, 'SIZE': size, 'LOCAL_RANK': local_rank, 'LOCAL_SIZE': local_size, 'CROSS_RANK': node,
               'CROSS_SIZE': num_nodes}
    return {f'HOROVOD_{name}': str(number) for name, number in numbers.items()}


def slurm_place(env: Mapping[str, str]) -> dict[str, str]:
    """Who a task of a Slurm step is, as Horovod reads it; nothing outside one."""
    if 'SLURM_PROCID' not in env:
        return {}
    num_nodes, size = _count('SLURM_STEP_NUM_NODES', env), _count('SLURM_STEP_NUM_TASKS', env)
    rank, local_rank, node = (environment_number(f'SLURM_{name}', env) or 0 for name in ('PROCID', 'LOCALID', 'NODEID'))
    return place_variables(rank, size, local_rank, size // num_nodes, node, num_nodes)


def _count(name: str, env: Mapping[str, str]) -> int:
    """A number from 1 that Slurm sets.

    Raises:
        ConfigError: it is not there.
    """
    count = environment_number(name, env)
    if not count:
        raise ConfigError(f'{name}: got {env.get(name, "nothing")} in the environment, expected a number from 1')
    return count


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What Horovod reads, for a rank whose launcher opened a meeting point; nothing for others.

    Finds the meeting point, and starts the forwarder through which the rank asks it.

    Args:
        env: RENDEZVOUS_VARIABLE, SECRET_VARIABLE, and Slurm's variables or Horovod's own HOROVOD_RANK and so on.

    Raises:
        ConfigError: there is no secret, or this host's own name leads nowhere.
        RankLost: the meeting point does not answer.
    """
    place = slurm_place(env) if 'HOROVOD_RANK' not in env else {'HOROVOD_RANK': env['HOROVOD_RANK']}
    if RENDEZVOUS_VARIABLE not in env or not place:
        return {}
    if not env.get(SECRET_VARIABLE):
        raise ConfigError(f'{SECRET_VARIABLE}: got nothing, expected the secret that the meeting point was given')
    hosts, _, port = env[RENDEZVOUS_VARIABLE].rpartition(':')
    if not port.isdecimal():
        raise ConfigError(f'{RENDEZVOUS_VARIABLE}: got {env[RENDEZVOUS_VARIABLE]!r} in the environment, expected '
                          'host:port')
    address = find_server(hosts.split(','), int(port), env[SECRET_VARIABLE])
    check_own_name(platform.node(), resolve(platform.node()), address)
    interface = env.get('HOROVOD_GLOO_IFACE') or interface_of(address_towards(address) or '', find_interfaces())
    if not interface:
        raise RankLost(f'{platform.node()}: got no network interface that leads to {address}')
    return {**place, 'HOROVOD_HOSTNAME': platform.node(), 'HOROVOD_CONTROLLER': 'gloo',
            'HOROVOD_CPU_OPERATIONS': 'gloo', 'HOROVOD_GLOO_IFACE': interface, 'HOROVOD_GLOO_RENDEZVOUS_ADDR': LOOPBACK,
            'HOROVOD_GLOO_RENDEZVOUS_PORT': str(start_forwarder(address, int(port), env[SECRET_VARIABLE]))}


def main(argv: Sequence[str]) -> int:
    """Serves, as a program; its last argument names the hosts. Returns its exit code."""
    try:
        if not os.environ.get(SECRET_VARIABLE):
            raise ConfigError(f'{SECRET_VARIABLE}: got nothing, expected a secret that nobody else knows')
        serve(argv[-1].split(','), os.environ[SECRET_VARIABLE])
    except UserError as e:
        print(f'mlperf_rn50.system.rendezvous: {e}', file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv))
