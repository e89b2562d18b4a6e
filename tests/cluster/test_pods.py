"""The pods of an Indexed Job, each on a host of its own, with what Kubernetes tells them; the tests play Kubernetes."""
import os
import signal
import subprocess
import time

import pytest
from cluster.conftest import run_metrics
from cluster.hosts import kill
from helpers import HANG_LIMIT_S, ROOT

from mlperf_rn50.train.checkpoint import list_checkpoints

SECRET = '3b1f0c5d' * 8


class PodJob:
    """A job of two pods of a rank each. One that ends with 75 or is killed is started again."""

    def __init__(self, cluster, folder, *arguments, **variables):
        self.cluster, self.run_dir, self.output_path = cluster, folder / 'run', folder / 'pods.out'
        self._command = [ROOT / 'launch/pod.sh', *arguments, '--run-dir', self.run_dir]
        self._variables = {
            'MLPERF_RN50_NODES': '2', 'MLPERF_RN50_RANKS_PER_NODE': '1', 'MLPERF_RN50_MEETING': 'job-0.service',
            'MLPERF_RN50_SECRET': SECRET, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), **variables}
        self.pods, self.codes = {}, {0: [], 1: []}

    def start(self, index, **variables):
        env = {**os.environ, **self._variables, 'JOB_COMPLETION_INDEX': str(index), **variables}
        with open(self.output_path, 'a') as output:
            self.pods[index] = subprocess.Popen(self.cluster.hosts[index].inside(self._command), env=env, stdout=output,
                                                stderr=subprocess.STDOUT)

    @property
    def output(self):
        return self.output_path.read_text()

    def kill(self, index):
        """As a host that loses its power."""
        kill(self.cluster.hosts[index].pids())

    def wait_for(self, is_reached, what):
        """Looks after the pods until something is reached."""
        deadline = time.monotonic() + HANG_LIMIT_S
        while not is_reached():
            assert time.monotonic() < deadline, f'{what} not reached: {self.output}'
            for index, pod in list(self.pods.items()):
                if pod.poll() is None:
                    continue
                self.codes[index].append(self.pods.pop(index).returncode)
                assert self.codes[index][-1] in (0, 75, -signal.SIGKILL), self.output
                if self.codes[index][-1]:
                    self.start(index)
            time.sleep(0.1)

    def wait_for_step(self, step):
        self.wait_for(lambda: any(m['step'] >= step for m in run_metrics(self.run_dir, 'train')), f'step {step}')


@pytest.fixture
def job(cluster, tiny_config, tmp_path):
    with open(cluster.folder / 'etc_hosts', 'a') as hosts:
        hosts.write(f'{cluster.hosts[0].address} job-0.service\n')
    made = PodJob(cluster, tmp_path, '--config', tiny_config, '--train.target_accuracy', '0.8')
    yield made
    for pod in made.pods.values():
        pod.kill()
        pod.wait()


def test_pods_that_are_drained_and_killed_reach_the_target(job):
    job.start(1)  # before there is a door
    job.start(0)
    job.wait_for_step(3)
    os.kill(job.pods[1].pid, signal.SIGTERM)  # nsenter became the pod
    job.wait_for(lambda: all(job.codes.values()), 'the end of both pods')
    assert job.codes == {0: [75], 1: [75]}, job.output
    assert [m['status'] for m in run_metrics(job.run_dir, 'end')] == ['interrupted']
    job.wait_for(lambda: run_metrics(job.run_dir, 'resumed'), 'the second attempt')
    job.wait_for_step(run_metrics(job.run_dir, 'resumed')[-1]['step'] + 12)
    job.kill(1)
    job.wait_for(lambda: not job.pods, 'the end of the job')
    assert job.codes == {0: [75, 75, 0], 1: [75, -signal.SIGKILL, 0]}, job.output
    assert [m['status'] for m in run_metrics(job.run_dir, 'end')] == ['interrupted', 'converged']
    first, second = (m['step'] for m in run_metrics(job.run_dir, 'resumed'))
    assert 0 < first < second and list_checkpoints(job.run_dir / 'checkpoints')
    log = (job.run_dir / 'result_0.txt').read_text()
    assert '"key": "number_of_nodes", "value": 2,' in log and not (job.run_dir / 'result_1.txt').exists()
    written = [p.read_bytes() for p in [job.output_path, *job.run_dir.rglob('*')] if p.is_file()]
    assert not any(SECRET.encode() in w or b'MLPERF_RN50_SECRET' in w for w in written)
    job.start(1)  # replaced after the others were done
    job.wait_for(lambda: not job.pods, 'the end of the latecomer')
    assert job.codes[1][-1] == 0 and 'the run of this job' in job.output


def test_a_pod_with_another_secret_is_refused(job):
    job.start(0)
    job.start(1, MLPERF_RN50_SECRET=SECRET[::-1], MLPERF_RN50_START_LIMIT_S='8')
    assert job.pods.pop(1).wait(HANG_LIMIT_S) == 2
    assert 'who answers at MLPERF_RN50_MEETING has another MLPERF_RN50_SECRET' in job.output
    assert job.pods[0].poll() is None and not (job.run_dir / 'pods.json').exists()
