"""mpirun and horovodrun over ssh, on one to four hosts."""

import json
import os
import re
import signal
import time

import pytest
import yaml
from cluster.conftest import run_metrics
from helpers import ROOT, argv, run

from mlperf_rn50.runfolder.names import list_checkpoints

# A target that the first evaluation reaches.
QUICK = ('--train.target_accuracy', '0.01')


@pytest.mark.engine
@pytest.mark.parametrize(
    'launcher, num_hosts', [('mpirun.sh', 1), ('mpirun.sh', 3), ('horovodrun.sh', 3)]
)
def test_training_on_hosts(start, cluster, tiny_config, launcher, num_hosts):
    job = start(*QUICK, '--data.shuffle', 'node', launcher=launcher, num_hosts=num_hosts)
    code, output = job.end()
    assert code == 0, output
    assert 'doctor: ' in output and ' 0 failed' in output
    names = [host.name for host in cluster.hosts[:num_hosts]]
    env = json.loads((job.run_dir / 'env.json').read_text())
    assert env['nodes'] == [{'hostname': name, 'num_ranks': 1} for name in names]
    log = (job.run_dir / 'result_0.txt').read_text()
    for key in ('nodes', 'ranks'):
        assert f'"key": "number_of_{key}", "value": {num_hosts},' in log
    config = yaml.safe_load((job.run_dir / 'config.yaml').read_text())['run']
    assert (config['num_nodes'], config['ranks_per_node']) == (num_hosts, 1)
    for number, name in enumerate(names):
        assert f'rank {number} on {name} (local 0): cores ' in output
    [epoch] = run_metrics(job.run_dir, 'epoch')
    assert set(epoch['record_bytes']) == set(names)
    whole = (tiny_config.parent / 'data/train.rec').stat().st_size
    sizes = epoch['new_record_bytes'].values()
    assert sum(sizes) == whole and max(sizes) < 1.2 * whole / num_hosts


@pytest.mark.engine
def test_program_on_hosts(cluster):
    code = 'echo $(hostname) $OMPI_COMM_WORLD_RANK'
    command = argv('{} --hosts h1,h2 2 sh -c {}', ROOT / 'launch/ranks.sh', code)
    done = run(cluster.hosts[0].inside(command), env=cluster.environment())
    assert sorted(done.stdout.splitlines()) == ['h1 0', 'h1 1', 'h2 2', 'h2 3'], done


def test_hostfile_and_two_ranks_per_host_on_one_device(start, cluster, tiny_config, tmp_path):
    (tmp_path / 'hosts').write_text('# one of them\nh3 slots=2\n\n')
    words = '--ranks-per-node 2 --ranks-per-device 2 --seeds 2 --run.seed null --clear-caches'
    hosts = ('--hostfile', tmp_path / 'hosts', '--nodes', 2)
    job = start(*QUICK, *words.split(), *hosts, num_hosts=1)
    code, output = job.end()
    assert code == 0, output
    nodes = json.loads((job.run_dir / 'env_1.json').read_text())['nodes']
    assert [n['hostname'] for n in nodes] == ['h1', 'h3']
    logs = [(job.run_dir / f'result_{k}.txt').read_text() for k in range(2)]
    assert len({re.search('"key": "seed", "value": (.*?),', log)[1] for log in logs}) == 2
    for text in ('"key": "cache_clear", "value": true', '"key": "number_of_ranks", "value": 4,'):
        assert all(text in log for log in logs)


@pytest.mark.parametrize('launcher', ['mpirun.sh', 'horovodrun.sh'])
def test_stop_request_leaves_a_checkpoint_and_the_printed_command_resumes(start, launcher):
    words = '--no-doctor --checkpoint.period_steps 0 --checkpoint.period_epochs 0'
    job = start(*words.split(), launcher=launcher)
    job.wait_for_step(10)
    os.kill(job.rank_pid(0), signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    time.sleep(7)  # longer than engines wait after SIGTERM (1 s and 5 s)
    os.kill(job.rank_pid(0), signal.SIGCONT)
    code, output = job.end()
    assert code == 75, output
    [path] = list_checkpoints(job.run_dir / 'checkpoints')
    job.start(['bash', '-c', re.search('resume with: (.*)', output)[1]])
    job.wait_for(lambda: run_metrics(job.run_dir, 'resumed'), 'the resume')
    job.process.send_signal(signal.SIGINT)
    code, output = job.end()
    assert code == 75 and f'resumed from {path}' in output, output
