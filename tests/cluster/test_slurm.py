"""Slurm jobs with a real controller and two nodes: training, interruption and requeue."""

import json
import os
import pwd
import re
import subprocess
from pathlib import Path

import pytest
from cluster.conftest import VARIABLES, Job, run_metrics
from cluster.hosts import Cluster, Host
from helpers import HANG_LIMIT_S, ROOT, argv, begin_run, keep_checkpoint, run, wait_for

from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train.checkpoint.checkpoint import load

BARE = ('--no-doctor', '--checkpoint.period_epochs', 0, '--checkpoint.period_steps', 0)


class Slurm:
    """munge, slurmctld and slurmd from Debian packages, with all files in one folder."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.processes: list[subprocess.Popen] = []
        self.controller, self.nodes = cluster.hosts[0], cluster.hosts[1:]
        self._start_munge()
        for name in ('state', *(f'tmp_{n.name}' for n in self.nodes)):
            (folder / name).mkdir()
        (folder / 'slurm.conf').write_text(self._configuration())
        self._start(self.controller, 'slurmctld', '-D')
        for node in self.nodes:
            self._start(node, 'slurmd', '-D')
        self._wait_until_ready()

    def _start_munge(self) -> None:
        munge = self.folder / 'munge'
        munge.mkdir()
        (munge / 'key').write_bytes(os.urandom(128))
        (munge / 'key').chmod(0o600)
        user = pwd.getpwnam('munge')
        for path in (munge, munge / 'key'):
            os.chown(path, user.pw_uid, user.pw_gid)
        for path in munge.parents:  # only the owner may enter folders of pytest
            if path.stat().st_mode & 0o011 != 0o011:
                path.chmod(path.stat().st_mode | 0o011)
        files = ('key-file', 'socket', 'pid-file', 'log-file', 'seed-file')
        self._start(
            self.controller,
            *'setpriv --reuid=munge --regid=munge --clear-groups munged -F'.split(),
            *(f'--{name}={munge}/{name.removesuffix("-file")}' for name in files),
        )
        munged = self.processes[-1]
        wait_for(
            (munge / 'socket').exists,
            lambda: munged.poll() is None,
            lambda: f'munged has ended or is late; its log is in {self.folder}',
        )

    def _configuration(self) -> str:
        nodes = ''.join(
            f'NodeName={n.name} NodeAddr={n.address} CPUs=2 RealMemory=4000\n' for n in self.nodes
        )
        return f"""ClusterName=test
SlurmctldHost={self.controller.name}({self.controller.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=300
OverTimeLimit=0
StateSaveLocation={self.folder}/state
TmpFS={self.folder}/tmp_%n
SlurmdSpoolDir={self.folder}/spool_%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd_%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd_%n.log
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

    def environment(self) -> dict[str, str]:
        return {**self.cluster.environment(), 'SLURM_CONF': str(self.folder / 'slurm.conf')}

    def _start(self, host: Host, *command: str) -> None:
        log = open(self.folder / f'{command[0]}_{host.name}.out', 'w')
        self.processes.append(
            subprocess.Popen(host.inside(command), env=self.environment(), stdout=log, stderr=log)
        )

    def call(self, *command: object, may_fail: bool = False) -> str:
        """Return the output of a Slurm command on the controller."""
        done = run(self.controller.inside(command), env=self.environment())
        assert may_fail or not done.returncode, f'{command}: {done.stdout}{done.stderr}'
        return done.stdout

    def _wait_until_ready(self) -> None:
        """Wait until every node is idle."""
        idle = f'{len(self.nodes)} idle\n'
        wait_for(
            lambda: self.call('sinfo', '-h', '-o', '%D %t', may_fail=True) == idle,
            lambda: True,
            lambda: f'Slurm is not ready; see {self.folder}',
            pause_s=0.2,
        )

    def state(self, job: str) -> str:
        """Return the state of a job from scontrol."""
        words = self.call('scontrol', 'show', 'job', job).split()
        return next(w.partition('=')[2] for w in words if w.startswith('JobState='))

    def close(self) -> None:
        self._wait_until_ready()  # a step that is ending needs munge
        for process in reversed(self.processes):
            process.terminate()
            process.wait(HANG_LIMIT_S)


@pytest.fixture(scope='module')
def slurm(cluster, tmp_path_factory):
    daemons = Slurm(cluster, tmp_path_factory.mktemp('slurm'))
    yield daemons
    daemons.close()


@pytest.fixture(autouse=True)
def _clean():
    """Override the reset of the hosts, which would kill the Slurm daemons."""


class SlurmJob:
    """Training job on two nodes."""

    def __init__(self, slurm, config, folder, *arguments, sbatch=()):
        self.slurm, self.run_dir, self.output_path = slurm, folder / 'run', folder / 'job.out'
        options = argv('--config {} --ranks-per-node 1 --run-dir {}', config, self.run_dir)
        command = argv('sbatch --parsable --nodes 2 --output {}', self.output_path)
        command += [*sbatch, ROOT / 'launch/slurm.sbatch', *options, *arguments]
        self.number = slurm.call(*command).strip()

    @property
    def output(self):
        return self.output_path.read_text() if self.output_path.exists() else ''

    def wait_for(self, is_reached, what):
        wait_for(
            is_reached, lambda: True, lambda: f'{what} not reached, {self.state}: {self.output}'
        )

    wait_for_step = Job.wait_for_step

    def wait_for_state(self, *states):
        self.wait_for(lambda: self.state in states, f'one of {states}')

    def assert_completed(self):
        self.wait_for_state('COMPLETED', 'FAILED')
        assert self.state == 'COMPLETED', self.output

    def wait_for_resume(self):
        self.wait_for(lambda: run_metrics(self.run_dir, 'resumed'), 'the resume')
        return run_metrics(self.run_dir, 'resumed')[0]['step']

    @property
    def state(self):
        return self.slurm.state(self.number)


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def submit(slurm, tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    jobs = []

    def submit_job(*arguments, sbatch=()):
        jobs.append(SlurmJob(slurm, tiny_config, tmp_path, *arguments, sbatch=sbatch))
        return jobs[-1]

    yield submit_job
    for job in jobs:
        slurm.call('scancel', job.number)
        job.wait_for_state('COMPLETED', 'CANCELLED', 'FAILED', 'TIMEOUT', 'NODE_FAIL')


@pytest.mark.engine
def test_ranks_of_srun_train_over_pmix(slurm, tiny_config, tmp_path):
    """The container engine, here without a container, uses Slurm's PMIx."""
    names = 'launch/engines/srun.sh', 'launch/bind.sh', '.venv/bin/mlperf-rn50'
    srun, *program = (ROOT / name for name in names)
    options = argv('--config {} --run.dir {}', tiny_config, tmp_path)
    options += '--train.target_accuracy 0.01'.split()
    command = *'salloc --quiet --nodes 2'.split(), srun, 'h2:1,h3:1', *program, 'train', *options
    assert 'converged' in slurm.call(*command)
    nodes = json.loads((tmp_path / 'env.json').read_text())['nodes']
    assert [n['hostname'] for n in nodes] == ['h2', 'h3']


@pytest.mark.engine
def test_training_on_two_nodes(submit):
    job = submit('--train.target_accuracy', '0.01')
    job.assert_completed()
    assert 'doctor: ' in job.output and 'converged' in job.output
    assert '"key": "number_of_nodes", "value": 2,' in (job.run_dir / 'result_0.txt').read_text()


def test_scancel_leaves_a_checkpoint_and_the_printed_command_resumes(submit):
    job = submit(*BARE)
    job.wait_for_step(10)
    job.slurm.call('scancel', job.number)
    job.wait_for_state('CANCELLED')
    job.wait_for(lambda: run_metrics(job.run_dir, 'end'), 'the end of the run')
    [path] = list_checkpoints(job.run_dir / 'checkpoints')
    assert load(path)[0].step >= 10
    assert run_metrics(job.run_dir, 'end')[0]['status'] == 'interrupted'
    job.wait_for(lambda: 'cancelled; the checkpoint is in' in job.output, 'the last message')
    assert job.state == 'CANCELLED'  # not requeued
    printed = re.search('; resume with: (sbatch .*)', job.output)[1]
    job.number = job.slurm.call('bash', '-c', printed).split()[-1]
    job.output_path = ROOT / f'slurm-{job.number}.out'
    job.wait_for_resume()
    job.slurm.call('scancel', job.number)
    job.wait_for_state('CANCELLED')
    job.output_path.unlink()


@pytest.mark.parametrize('is_starting', [False, True])
def test_job_is_requeued_on_the_signal_before_the_time_limit_and_converges(submit, is_starting):
    job = submit(*BARE, '--train.target_accuracy', '0.8')
    job.wait_for(lambda: job.output.count(': cores ') == 2, 'the ranks')
    if not is_starting:
        job.wait_for_step(10)
    # as sent by --signal=B:USR1@90
    job.slurm.call(*argv('scancel --batch --signal USR1 {}', job.number))
    job.wait_for_resume()
    job.assert_completed()
    assert 'requeued and resumes from' in job.output and 'resumed from' in job.output
    assert [m['status'] for m in run_metrics(job.run_dir, 'end')] == ['interrupted', 'converged']


def test_job_is_requeued_with_a_checkpoint_at_the_time_limit(submit):
    # Slurm may send the signal 30 s earlier
    job = submit(*BARE, sbatch=('--time', 60, '--signal', 'B:USR1@60'))
    job.wait_for_step(1)
    shown = job.slurm.call('scontrol', 'show', 'job', job.number)
    [(hours, minutes)] = re.findall(r'RunTime=(\d\d):(\d\d):', shown)
    limit = 60 * int(hours) + int(minutes) + 2
    job.slurm.call('scontrol', 'update', f'JobId={job.number}', f'TimeLimit={limit}')
    assert job.wait_for_resume() > 0
    assert run_metrics(job.run_dir, 'end')[0]['status'] == 'interrupted'


@pytest.mark.parametrize(
    'event',
    ['requeue {job}', 'update NodeName=h3 State=DOWN Reason=test'],
)
def test_job_resumes_after_its_operator_requeued_it_or_took_a_node_down(submit, event):
    job = submit('--no-doctor', '--checkpoint.period_steps', 8, '--train.target_accuracy', '0.6')
    job.wait_for(lambda: list(job.run_dir.glob('checkpoints/step_*8')), 'the checkpoint of step 8')
    job.slurm.call('scontrol', *event.format(job=job.number).split())
    assert job.wait_for_resume() >= 8
    job.assert_completed()


def test_job_that_is_requeued_before_its_run_begins_leaves_an_older_run_alone(submit, tmp_path):
    (tmp_path / 'run').mkdir()
    older = begin_run(tmp_path / 'run')
    keep_checkpoint(older, 24)
    before = older.result.read_bytes()
    job = submit('--train.target_accuracy', '0.01')
    job.wait_for(lambda: 'checking the nodes' in job.output, 'the doctor')
    job.slurm.call('scontrol', 'requeue', job.number)
    job.assert_completed()
    assert 'resumed from' not in job.output and older.result.read_bytes() == before
    assert '"key": "number_of_nodes", "value": 2,' in (job.run_dir / 'result_1.txt').read_text()
