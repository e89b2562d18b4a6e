"""Full TMPDIR and /dev/shm, which stop a start with an error but do not affect a started run."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from cluster.conftest import mounted, run_metrics
from cluster.hosts import Host
from cluster.test_faults import BARE

from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train.checkpoint.checkpoint import load

SHM = Path('/dev/shm')
SMALL_DISK = ('-t', 'tmpfs', '-o', 'size=64m', 'tmpfs')


def fill(host: Host, folder: Path) -> None:
    """Fill the disk of a folder on a host."""
    inside = Path(f'/proc/{host.keeper.pid}/root{folder}')
    with open(inside / 'filler', 'wb', buffering=0) as f, suppress(OSError):
        while f.write(bytes(4096)):
            pass
    assert os.statvfs(inside).f_bavail == 0


@pytest.fixture
def tmp(tmp_path) -> Path:
    """TMPDIR of a job."""
    folder = tmp_path / 'tmp'
    folder.mkdir()
    return folder


@pytest.mark.parametrize('arguments', [(), BARE])
def test_full_disk_of_remote_host_is_reported(start, cluster, tmp, arguments):
    with mounted(cluster.hosts[1:2], *SMALL_DISK, tmp):
        fill(cluster.hosts[1], tmp)
        code, output = start(*arguments, '--ranks-per-node', 2, TMPDIR=str(tmp)).end()
    messages = [line for line in output.splitlines() if line.startswith('mlperf-rn50: ')]
    assert code == 2, output
    assert messages == [
        f'mlperf-rn50: h2: TMPDIR: {tmp} has 0.0 MB free, expected 10 MB for files of Open MPI; '
        'free '
        'space there'
    ], output


def test_started_run_is_not_affected(start, cluster, tmp):
    hosts = cluster.hosts[:2]
    with mounted(hosts, *SMALL_DISK, tmp), mounted(hosts, *SMALL_DISK, SHM):
        job = start(*BARE, '--ranks-per-node', 2, '--train.max_epochs', 4, TMPDIR=str(tmp))
        job.wait_for_step(8)
        for host in hosts:
            for folder in (tmp, SHM):
                fill(host, folder)
        num_steps, num_evals = (len(run_metrics(job.run_dir, event)) for event in ('train', 'eval'))
        code, output = job.end()
    # not ended by the full disks
    assert code == 1 and 'aborted: the target was not reached' in output, output
    evals = run_metrics(job.run_dir, 'eval')
    assert num_evals < len(evals) == 4
    assert load(list_checkpoints(job.run_dir / 'checkpoints')[-1])[0].step > num_steps
