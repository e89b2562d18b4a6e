"""What a task of a Slurm step tells Horovod, and what a launcher's environment says of a rank."""
import platform
import subprocess
import sys
import urllib.request

import pytest

from mlperf_rn50.system import rendezvous
from mlperf_rn50.system.launched import launched_local, launched_rank, launched_size, rank_name

TASK = {'SLURM_PROCID': '5', 'SLURM_LOCALID': '1', 'SLURM_NODEID': '2', 'SLURM_STEP_NUM_NODES': '4',
        'SLURM_STEP_NUM_TASKS': '8', 'MLPERF_RN50_RENDEZVOUS': 'localhost:4711'}


def test_a_slurm_task_knows_its_place_and_the_way_to_the_others():
    got = rendezvous.rank_variables(TASK)
    assert got == {
        'HOROVOD_RANK': '5', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '1', 'HOROVOD_LOCAL_SIZE': '2',
        'HOROVOD_CROSS_RANK': '2', 'HOROVOD_CROSS_SIZE': '4', 'HOROVOD_HOSTNAME': platform.node(),
        'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo', 'HOROVOD_GLOO_IFACE': 'lo',
        'HOROVOD_GLOO_RENDEZVOUS_ADDR': '127.0.0.1', 'HOROVOD_GLOO_RENDEZVOUS_PORT': '4711'}


@pytest.mark.parametrize('missing', ['SLURM_PROCID', 'MLPERF_RN50_RENDEZVOUS'])
def test_outside_a_step_of_ours_nothing_is_set(missing):
    assert rendezvous.rank_variables({k: v for k, v in TASK.items() if k != missing}) == {}


def test_the_meeting_point_serves_until_nobody_listens():
    server = subprocess.Popen([sys.executable, '-m', 'mlperf_rn50.system.rendezvous', '1', 'h1,h2'],
                              stdout=subprocess.PIPE, text=True)
    host, _, port = server.stdout.readline().strip().rpartition(':')
    assert host == platform.node()
    request = urllib.request.Request(f'http://127.0.0.1:{port}/scope/key', data=b'value', method='PUT')
    assert urllib.request.urlopen(request).status == 200
    assert urllib.request.urlopen(f'http://127.0.0.1:{port}/scope/key').read() == b'value'
    server.stdout.close()
    assert server.wait(30) == 0


@pytest.mark.parametrize('variables, expected', [
    ({}, (0, None, (0, 1))),
    ({'OMPI_COMM_WORLD_RANK': '3', 'OMPI_COMM_WORLD_SIZE': '8', 'OMPI_COMM_WORLD_LOCAL_RANK': '1',
      'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}, (3, 8, (1, 2))),
    ({'HOROVOD_RANK': '6', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '0', 'HOROVOD_LOCAL_SIZE': '4'}, (6, 8, (0, 4))),
])
def test_launchers_say_who_a_rank_is(monkeypatch, variables, expected):
    for name in ('OMPI_COMM_WORLD', 'HOROVOD', 'PMI', 'PMIX'):
        for part in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE'):
            monkeypatch.delenv(f'{name}_{part}', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launched_rank(), launched_size(), launched_local()) == expected
    assert rank_name() == f'rank {expected[0]} on {platform.node()}'
