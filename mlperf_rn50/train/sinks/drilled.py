"""Faults of this rank and its host that a user requests with --drill."""

import errno
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import writing
from mlperf_rn50.parser import Drill
from mlperf_rn50.train import run_events as events

LINK_S = 60  # time for which the link is lost


class Drilled:
    """Sink that causes a requested fault of this rank.

    Raises ConfigError for a lost link of a host on which no connection of the launcher is visible.
    """

    def __init__(self, drill: Drill, path: Path):
        """path: of a file of the run."""
        self._drill, self._path = drill, path
        if drill.kind == 'link' and not find_connections():
            raise ConfigError(
                f'--drill: got {drill}, but this rank sees no sshd of the launcher, expected a '
                'rank on a host over ssh, outside a container; choose another rank, or stop'
            )

    def handle(self, event: events.Event) -> None:
        if not isinstance(event, events.StepDone) or event.step != self._drill.step:
            return
        match self._drill.kind:
            case 'kill':
                os.kill(os.getpid(), signal.SIGKILL)
            case 'stop':
                os.kill(os.getpid(), signal.SIGSTOP)
            case 'hang':
                threading.Event().wait()
            case 'link':
                lose_link()
            case 'full-disk':
                with writing(self._path):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        pass


def find_connections() -> list[psutil.Process]:
    """Return the processes of sshd over which the launcher started this job's processes here.

    Each serves one connection; the one that accepts new connections is not among them.
    """
    job = os.environ.get('MLPERF_RN50_JOB')
    found: dict[int, psutil.Process] = {}
    if not job:
        return []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended, or of another user
            # a guard has the job in its command line only
            if job in process.cmdline() or process.environ().get('MLPERF_RN50_JOB') == job:
                sshd = next((p for p in process.parents() if p.name().startswith('sshd')), None)
                if sshd:
                    found[sshd.pid] = sshd
    return list(found.values())


def lose_link() -> None:
    """Stop the connections of this host and then this rank, as with a lost link.

    After LINK_S the connections go on, and end, because the launcher has closed them.
    """
    connections = find_connections()
    pids = ' '.join(str(c.pid) for c in connections)
    subprocess.Popen(
        ['sh', '-c', f'sleep {LINK_S}; kill -CONT {pids}'],
        env={},  # not of the job, whose processes are ended before
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for connection in connections:
        connection.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)
