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
    env = json.loads((job.run_dir / 'env.json').read_text())
    assert env['nodes'] == [{'hostname': h.name, 'num_ranks': 1} for h in cluster.hosts[:num_hosts]]
    log = (job.run_dir / 'result_0.txt').read_text()
    assert f'"key": "number_of_nodes", "value": {num_hosts},' in log
    assert f'"key": "number_of_ranks", "value": {num_hosts},' in log
    config = yaml.safe_load((job.run_dir / 'config.yaml').read_text())['run']
    assert (config['num_nodes'], config['ranks_per_node']) == (num_hosts, 1)
    for number, host in enumerate(cluster.hosts[:num_hosts]):
        assert f'rank {number} on {host.name} (local 0): cores ' in output
    [epoch] = run_metrics(job.run_dir, 'epoch')
    assert set(epoch['record_bytes']) == {h.name for h in cluster.hosts[:num_hosts]}
    whole = (tiny_config.parent / 'data/train.rec').stat().st_size
    assert sum(epoch['new_record_bytes'].values()) == whole
    assert max(epoch['new_record_bytes'].values()) < 1.2 * whole / num_hosts


@pytest.mark.engine
def test_program_on_hosts(cluster):
    command = [
        *argv('{} --hosts h1,h2 2 sh -c', ROOT / 'launch/ranks.sh'),
        'echo $(hostname) $OMPI_COMM_WORLD_RANK',
    ]
    done = run(cluster.hosts[0].inside(command), env=cluster.environment())
    assert sorted(done.stdout.splitlines()) == ['h1 0', 'h1 1', 'h2 2', 'h2 3'], done


def test_hostfile_and_two_ranks_per_host_on_one_device(start, cluster, tiny_config, tmp_path):
    (tmp_path / 'hosts').write_text('# one of them\nh3 slots=2\n\n')
    job = start(
        *QUICK,
        *argv(
            '--ranks-per-node 2 --ranks-per-device 2 --seeds 2 --run.seed null '
            '--clear-caches --hostfile {} --nodes 2',
            tmp_path / 'hosts',
        ),
        num_hosts=1,
    )
    code, output = job.end()
    assert code == 0, output
    assert [
        n['hostname'] for n in json.loads((job.run_dir / 'env_1.json').read_text())['nodes']
    ] == ['h1', 'h3']
    logs = [(job.run_dir / f'result_{k}.txt').read_text() for k in range(2)]
    assert len({log.split('"key": "seed", "value": ')[1].split(',')[0] for log in logs}) == 2
    assert all('"key": "cache_clear", "value": true' in log for log in logs)
    assert all('"key": "number_of_ranks", "value": 4,' in log for log in logs)


@pytest.mark.parametrize('launcher', ['mpirun.sh', 'horovodrun.sh'])
def test_stop_request_leaves_a_checkpoint_and_the_printed_command_resumes(start, launcher):
    job = start(
        '--no-doctor',
        '--checkpoint.period_steps',
        0,
        '--checkpoint.period_epochs',
        0,
        launcher=launcher,
        num_hosts=2,
    )
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
