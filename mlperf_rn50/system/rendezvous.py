"""Where the ranks of a Slurm job meet: Horovod's own rendezvous server for Gloo, and what each rank must know of it.

Plain srun says who each rank is but not where the others are; with this, neither MPI nor PMI nor ssh is needed.
"""
import os
import platform
import select
import socket
import sys
from collections.abc import Mapping

import psutil

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.launched import environment_number


def serve(ranks_per_node: int, hosts: list[str]) -> None:
    """Serves until the reader of its output goes away; prints the address as host:port."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments([HostInfo(h, ranks_per_node) for h in hosts], ranks_per_node * len(hosts)))
    print(f'{platform.node()}:{port}', flush=True)
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    poller.poll()
    os._exit(0)


def nearest_interface(host: str, port: int) -> tuple[str, str]:
    """Address of a host, and the name of the network interface that leads there."""
    address = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = probe.getsockname()[0]
    names = [name for name, found in psutil.net_if_addrs().items() if any(a.address == own for a in found)]
    return address, names[0]


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
    """What Horovod reads, for a task of a Slurm step; nothing outside one.

    Args:
        env: Slurm's variables and MLPERF_RN50_RENDEZVOUS, host:port.
    """
    if 'MLPERF_RN50_RENDEZVOUS' not in env or 'SLURM_PROCID' not in env:
        return {}
    host, _, port = env['MLPERF_RN50_RENDEZVOUS'].rpartition(':')
    if not port.isdecimal():
        raise ConfigError(f'MLPERF_RN50_RENDEZVOUS: got {env["MLPERF_RN50_RENDEZVOUS"]!r} in the environment, expected '
                          'host:port')
    address, interface = nearest_interface(host, int(port))
    num_nodes, size = _count('SLURM_STEP_NUM_NODES', env), _count('SLURM_STEP_NUM_TASKS', env)
    return {'HOROVOD_RANK': env['SLURM_PROCID'], 'HOROVOD_SIZE': str(size), 'HOROVOD_LOCAL_RANK': env['SLURM_LOCALID'],
            'HOROVOD_LOCAL_SIZE': str(size // num_nodes), 'HOROVOD_CROSS_RANK': env['SLURM_NODEID'],
            'HOROVOD_CROSS_SIZE': str(num_nodes), 'HOROVOD_HOSTNAME': platform.node(),
            'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo', 'HOROVOD_GLOO_IFACE': interface,
            'HOROVOD_GLOO_RENDEZVOUS_ADDR': address, 'HOROVOD_GLOO_RENDEZVOUS_PORT': port}


if __name__ == '__main__':
    serve(int(sys.argv[1]), sys.argv[2].split(','))
