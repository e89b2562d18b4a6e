"""Hosts made of network, UTS and mount namespaces, each with an address, a name and sshd, and with
a shared disk.

A bridge connects them like a switch. Requires root, iproute2, openssh-server and util-linux.
Run as a program, it runs a command on the first of N hosts, named h1 to hN:
  python tests/cluster/hosts.py 8 launch/sweep.sh --hosts h1,h2,h3,h4,h5,h6,h7,h8 ...
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SUBNET = '10.213.77'
_SSHD = '/usr/sbin/sshd'


def _call(*command: object) -> None:
    """Run a command, given as a text or as its words; it must succeed."""
    words = shlex.split(command[0]) if len(command) == 1 else command
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, f'{command}: {done.stdout}{done.stderr}'


@dataclass
class Host:
    """Name and address of a host, and the process that keeps the namespaces alive."""

    name: str
    address: str
    keeper: subprocess.Popen
    sshd: subprocess.Popen | None = None

    def inside(self, command: Sequence[object]) -> list[str]:
        """Wrap a command so that it runs on this host."""
        enter = f'nsenter -t {self.keeper.pid} -n -u -m'.split()
        return [*enter, f'--wdns={os.getcwd()}', '--', *map(str, command)]

    def call(self, *command: object) -> None:
        """Run a command on this host; it must succeed."""
        _call(*self.inside(command))

    def pids(self, of_sshd: bool = False) -> list[int]:
        """Return the sshd processes of this host, or all others except the keeper."""
        processes = [
            p
            for p in map(int, filter(str.isdecimal, os.listdir('/proc')))
            if _namespace(p) == _namespace(self.keeper.pid) and p != self.keeper.pid
        ]
        return [p for p in processes if (words(p)[:1] in ([_SSHD], ['sshd:'])) == of_sshd]

    def ranks(self) -> list[int]:
        """Return the training processes of this host, including supervisors."""
        return [
            p for p in self.pids() if 'train' in words(p) and any('mlperf' in w for w in words(p))
        ]

    def rank(self) -> int | None:
        """Return the training process of a host with one rank: a fork of the watcher with the same
        command line."""
        # python -E
        ranks = [p for p in self.ranks() if any(w.endswith('/mlperf-rn50') for w in words(p)[1:3])]
        return next(
            (p for p in ranks if _parent(p) in ranks and _parent(_parent(p)) not in ranks), None
        )


def kill(pids: Iterable[int]) -> None:
    """Kill processes, ignoring any that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f'/proc/{pid}/ns/net')
    except OSError:
        return ''


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    try:
        return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
    except OSError:
        return 0


def words(pid: int) -> list[str]:
    """Return the command line of a process."""
    try:
        return re.split(r'[\0 ]', Path(f'/proc/{pid}/cmdline').read_text())
    except OSError:
        return []


class Cluster:
    """Hosts h1 to hN, connected by ssh. With a domain such as .example, only their full names
    resolve."""

    def __init__(self, folder: Path, num_hosts: int, domain: str = '', variables: str = ''):
        """Start the hosts; variables (NAME=VALUE ...) are set for all processes started over
        ssh."""
        self.folder, self.variables = folder, variables
        # A process may have a cluster of each kind.
        self.bridge = f'{"full" if domain else "rn50"}-{os.getpid() % 100000}'
        self.hosts: list[Host] = []
        self._make_keys()
        _call(f'ip link add {self.bridge} type bridge')
        _call(f'ip link set {self.bridge} up')
        addresses = {f'h{i}{domain}': f'{_SUBNET}.{i}' for i in range(1, num_hosts + 1)}
        lines = [f'{address} {name}\n' for name, address in addresses.items()]
        (folder / 'etc_hosts').write_text(''.join(['127.0.0.1 localhost\n', *lines]))
        for name, address in addresses.items():
            self._add_host(name, address)

    def _make_keys(self) -> None:
        for name in ('user', 'server'):
            _call(f"ssh-keygen -q -t ed25519 -N '' -f '{self.folder / name}'")
        (self.folder / 'ssh_config').write_text(f"""Host *
 User root
 IdentityFile {self.folder}/user
 StrictHostKeyChecking no
 LogLevel ERROR
 UserKnownHostsFile {self.folder}/known_hosts
""")
        ssh = self.folder / 'bin/ssh'
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def _link(self, host: Host) -> str:
        return f'{self.bridge}-{host.name.partition(".")[0]}'[-15:]

    def _add_host(self, name: str, address: str) -> None:
        keeper = subprocess.Popen(
            'unshare --net --uts --mount --propagation private sleep infinity'.split()
        )
        host = Host(name, address, keeper)
        self.hosts.append(host)
        while _namespace(keeper.pid) == _namespace(os.getpid()):
            time.sleep(0.01)
        _call(f'ip link add {self._link(host)} type veth peer name eth0 netns {keeper.pid}')
        self.set_link(host, True)
        # A shell over ssh reads .bashrc, which may block for a minute on a lock left by a killed
        # shell.
        host.call(
            'bash',
            '-ec',
            f"""hostname {name.partition('.')[0]}
ip addr add {address}/24 dev eth0; ip link set eth0 up
ip link set lo up; mount --bind {self.folder}/etc_hosts /etc/hosts
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc""",
        )
        self.start_sshd(host)

    def start_sshd(self, host: Host, *settings: str) -> None:
        """Start sshd on a host, with further settings such as ForceCommand=COMMAND."""
        Path('/run/sshd').mkdir(exist_ok=True)
        options = [f'HostKey={self.folder}/server', f'AuthorizedKeysFile={self.folder}/user.pub']
        options += f"""StrictModes=no PermitRootLogin=yes UsePAM=no PidFile=none MaxStartups=100
            ListenAddress={host.address}""".split()
        options += [*settings, *([f'SetEnv={self.variables}'] if self.variables else [])]
        host.sshd = subprocess.Popen(
            host.inside([_SSHD, '-D', '-e', *(f'-o{option}' for option in options)]),
            stderr=open(self.folder / f'sshd_{host.name}.log', 'w'),
        )

    def kill_sshd(self, host: Host) -> None:
        """Kill sshd and all its connections on a host, but not the processes started over them."""
        kill(host.pids(of_sshd=True))
        assert host.sshd
        host.sshd.wait()

    def environment(self) -> dict[str, str]:
        """Return the environment for ssh between hosts."""
        return {**os.environ, 'PATH': f'{self.folder}/bin:{os.environ["PATH"]}'}

    def set_link(self, host: Host, is_up: bool) -> None:
        """Cut or restore the link of a host; a cut link drops packets without errors."""
        state = f'master {self.bridge} up' if is_up else 'nomaster'
        _call(f'ip link set {self._link(host)} {state}')

    def reset(self) -> None:
        """Kill all processes on the hosts, restore all links, and restart sshd where it is
        missing."""
        for host in self.hosts:
            kill(host.pids())
            self.set_link(host, True)
            if host.sshd and host.sshd.poll() is not None:
                self.start_sshd(host)

    def close(self) -> None:
        self.reset()
        for host in self.hosts:
            for process in (host.sshd, host.keeper):
                if process:
                    process.kill()
                    process.wait()
        subprocess.run(['ip', 'link', 'del', self.bridge], check=False)


def main(num_hosts: int, command: Sequence[str]) -> int:
    """Run a command on the first of some hosts; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), num_hosts)
        try:
            return subprocess.call(cluster.hosts[0].inside(command), env=cluster.environment())
        finally:
            cluster.close()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'num_hosts', metavar='N', type=int, choices=range(1, 250), help='number of hosts'
    )
    parser.add_argument('command', nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if os.geteuid() or not options.command:
        parser.error('expected root and a command')
    sys.exit(main(options.num_hosts, options.command))
