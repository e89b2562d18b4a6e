"""Hosts that resolve only by full names, on which login shells load modules for another Python."""

import json

import pytest
from cluster.hosts import Cluster
from helpers import write_files

QUICK = ('--train.target_accuracy', '0.01')


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp('hosts')
    (folder / 'module').mkdir()
    write_files(
        folder / 'module',
        {
            f'{name}.py': 'raise ImportError("from a module")'
            for name in ('sitecustomize', 'numpy', 'psutil', 'cloudpickle', 'yaml')
        },
    )
    hosts = Cluster(
        folder, 3, '.cluster.example', f'PYTHONPATH={folder}/module PYTHONHOME=/nowhere'
    )
    yield hosts
    hosts.close()


def train(start, cluster, launcher):
    job = start(*QUICK, launcher=launcher, num_hosts=3, PYTHONPATH=str(cluster.folder / 'module'))
    code, output = job.end()
    assert code == 0, output
    assert 'from a module' not in output
    return [
        node['hostname'] for node in json.loads((job.run_dir / 'env.json').read_text())['nodes']
    ]


def test_mpirun_trains(start, cluster):
    assert train(start, cluster, 'mpirun.sh') == ['h1', 'h2', 'h3']


def test_horovodrun_trains_if_hosts_know_their_full_names(start, cluster):
    code, output = start(launcher='horovodrun.sh').end()
    assert code == 2 and 'launch/bind.sh: host name h' in output, output
    for host in cluster.hosts:
        host.call('hostname', host.name)
    assert train(start, cluster, 'horovodrun.sh') == [host.name for host in cluster.hosts]


def test_silent_host_is_excluded_by_its_full_name(start, cluster):
    job = start('--restarts', 1, '--elastic', '--train.max_epochs', 3, num_hosts=3)
    job.wait_for_step(8)
    cluster.set_link(cluster.hosts[2], False)
    job.wait_for_restart(1)
    assert 'host h3.cluster.example (with rank 2) does not answer h1' in job.output
    assert 'excluding h3.cluster.example, which did not answer' in job.output
    job.wait_for_step(16)
