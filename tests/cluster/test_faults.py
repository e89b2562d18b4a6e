"""Faults of hosts, links and disks, after which the run ends on all hosts with a report, or
resumes."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy
import psutil
import pytest
from cluster.conftest import mounted, run_metrics
from cluster.hosts import kill, words
from helpers import wait_for

from mlperf_rn50.data.recordio import load_manifest
from mlperf_rn50.data.verify import dump_manifest
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train.checkpoint.checkpoint import load

BARE = ('--no-doctor',)
PHASE = '(training|evaluation|writing a checkpoint)'
RECORDED = r'last recorded: step \d+, (training|evaluation)'


def assert_nothing_lost(run_dir):
    """Assert that the newest checkpoint, the log and the metrics are complete."""
    assert '"run_start"' in (run_dir / 'result_0.txt').read_text()
    newest = list_checkpoints(run_dir / 'checkpoints')[-1]
    assert load(newest)[0].step == int(newest.name[5:])
    steps = [m['step'] for m in run_metrics(run_dir, 'train')]
    assert steps == list(range(1, 1 + len(steps)))


def assert_ended(job, *patterns, code=None):
    got, output = job.end()
    assert got != 0 and (code is None or got == code) and 'Traceback' not in output, output
    for pattern in patterns:
        assert re.search(pattern, output), f'{pattern!r} is not in: {output}'
    return output


def causes_of(job):
    return [a['cause'] for _, a in read_lines(job.run_dir / 'attempts.jsonl', dict)]


@pytest.fixture
def start_to(start):
    """Function that starts a launcher without a doctor, and waits for a step."""

    def start_to(*options, step=8, **keys):
        job = start(*BARE, *options, **keys)
        job.wait_for_step(step)
        return job

    return start_to


CONTACT = '(had no contact to the launcher for 20 s|lost its connection to the launcher)'
ALONE = ('--comm.stall_limit_s', 0)  # no rank notices the cut
AGAIN = ('--restarts', 1, '--train.target_accuracy', 0.6)
SHORT = ('--checkpoint.period_epochs', 0, '--train.max_epochs', 3)


SILENT = f'does not answer h1; {RECORDED}'
# a link that returns when the ranks end: the launcher may ask the host just before
LOST = f'({CONTACT}|does not answer h1)'


def cut(phase, *texts, num_hosts=2, until=None, options=ALONE, code=1, causes=None, ranks=()):
    """Return a case of the next test, by default without a restart."""
    return pytest.param(phase, num_hosts, until, options, code, texts, causes, list(ranks))


@pytest.mark.parametrize(
    'phase, num_hosts, until, options, code, texts, causes, ranks',
    [
        cut('start-up', 'does not answer h1; (before a run began|last recorded: step 0, start-up)'),
        cut('training', SILENT, num_hosts=3),
        cut('evaluation', SILENT),
        cut('checkpoint', SILENT),
        # not ended by the fault
        cut('training', 'aborted: the target', until=3, options=SHORT, causes=['aborted']),
        cut(
            'training',
            f'{LOST}; {RECORDED}',
            until=20,
            options=AGAIN,
            code=0,
            causes=[f'host h2 {LOST}', 'converged'],
            ranks=[2],
        ),
        cut(
            'training',
            'restart 1 of 1',
            until='does not answer',
            options=AGAIN,
            code=0,
            ranks=[2],
        ),
        cut(
            'training',
            'excluding h3, which did not answer',
            r'2 ranks \(before: 3\) on h1, h2, global batch 24 \(before: 24\), learning',
            num_hosts=3,
            options=(*AGAIN, '--elastic'),
            code=0,
            ranks=[2],
        ),
        cut(
            'start-up',
            'excluding h3, which did not answer',
            '2 ranks x 13 = global batch 26',
            '2 of 3 configured ranks: learning rate times 0.963',
            num_hosts=3,
            options=(*AGAIN, '--elastic', '--train.global_batch_size', 27),
            code=0,
        ),
    ],
    ids='start-up training evaluation checkpoint short long waiting elastic anew'.split(),
)
def test_cut_link(start, cluster, phase, num_hosts, until, options, code, texts, causes, ranks):
    """Cut the link of the last host in a phase, until a time in seconds or a message.

    Args:
        texts: of the output; a message on the host begins with its name.
        causes: of all attempts.
        ranks: numbers of ranks of the resumes.
    """
    job = start(*BARE, *options, num_hosts=num_hosts)
    host = cluster.hosts[num_hosts - 1]
    with job.held_in(phase):
        cluster.set_link(host, False)
    if until:
        if isinstance(until, str):
            job.wait_for(lambda: until in job.output, 'the message')
        else:
            time.sleep(until)
        cluster.set_link(host, True)
    got, output = job.end()
    assert got == code, output
    name = rf'host {host.name} \(with rank {num_hosts - 1}\) '
    for text in texts:
        is_of_host = RECORDED in text or phase == 'start-up' and code
        assert re.search(f'{name if is_of_host else ""}{text}', output), output
    if causes:
        found = causes_of(job)
        assert len(found) == len(causes) and all(map(re.fullmatch, causes, found)), found
    if phase == 'start-up':
        return
    resumed = run_metrics(job.run_dir, 'resumed')
    assert [(m['number_of_ranks'], m['number_of_nodes'], m['lr_scale']) for m in resumed] == [
        (n, n, 1.0) for n in ranks
    ]
    log = (job.run_dir / 'result_0.txt').read_text()
    assert log.count('"key": "run_resumed"') == len(ranks)
    if not ranks:
        assert_nothing_lost(job.run_dir)
    if options is SHORT:
        assert len(run_metrics(job.run_dir, 'eval')) == 3


@pytest.mark.slow  # a host is tested every 30 s
@pytest.mark.parametrize('launcher', ['mpirun.sh', 'horovodrun.sh'])
def test_excluded_host_is_taken_back_once_its_link_is_restored(start_to, cluster, launcher):
    """The configured batch of 27 images is rounded down for 2 ranks, and comes back for 3."""
    options = ('--restarts', 1, '--elastic', '--train.global_batch_size', 27)
    job = start_to(*ALONE, *options, num_hosts=3, launcher=launcher)
    for is_up, number in ((False, 1), (True, 2)):
        cluster.set_link(cluster.hosts[2], is_up)
        job.wait_for(
            lambda number=number: len(run_metrics(job.run_dir, 'resumed')) == number, 'the resume'
        )
    fewer, all_ = run_metrics(job.run_dir, 'resumed')
    assert (fewer['hosts'], all_['hosts']) == ({'h1': 1, 'h2': 1}, {'h1': 1, 'h2': 1, 'h3': 1})
    assert [m['global_batch_size'] for m in (fewer, all_)] == [26, 27]
    assert [m['lr_scale'] for m in (fewer, all_)] == [pytest.approx(26 / 27), 1.0]
    job.wait_for_step(all_['step'] + 3)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 75 and 'to take back h3' in output and 'restart 1 of 1' in output, output
    assert causes_of(job)[1:] == ['stopped to take back h3', 'interrupted']
    # No step before the growth is lost; both batches make 6 steps of an epoch.
    lines = [m for _, m in read_lines(job.run_dir / 'metrics.jsonl', dict)]
    steps = [m['step'] for m in lines[: lines.index(all_)] if m['event'] == 'train']
    epoch, step = divmod(steps[-1], 6)
    assert all_['step'] == 6 * epoch + step * 26 // 27


@pytest.mark.parametrize(
    'launcher, victim', [('mpirun.sh', 0), ('mpirun.sh', 2), ('horovodrun.sh', 2)]
)
def test_killed_rank_is_reported(start_to, launcher, victim):
    job = start_to(launcher=launcher, num_hosts=3)
    os.kill(job.rank_pid(victim), signal.SIGKILL)
    who = rf'rank {victim} on h{victim + 1}, step \d+, {PHASE}'
    assert_ended(job, rf'{who}: killed by signal 9 \(SIGKILL\)')
    assert_nothing_lost(job.run_dir)


@pytest.mark.slow  # the limit of a login is 60 s
@pytest.mark.parametrize(
    'words',
    [BARE, (), ('--restarts', 1, '--elastic', '--train.target_accuracy', 0.05)],
    ids=['ranks', 'doctor', 'elastic'],
)
def test_host_whose_login_hangs_is_named_or_excluded(start, cluster, words):
    cluster.kill_sshd(cluster.hosts[1])
    cluster.start_sshd(cluster.hosts[1], 'ForceCommand=sleep 100000')
    try:
        job = start(*words)
        code, output = job.end()
    finally:
        cluster.kill_sshd(cluster.hosts[1])
    named = 'host h2 (with rank 1) was not reached: no login within 60 s; before a run began'
    assert named in output and code == (0 if '--elastic' in words else 1), output
    wait_for(lambda: not cluster.hosts[0].pids())  # ssh ends just after the launcher
    assert job.run_dir.exists() == ('--elastic' in words)


def test_host_with_one_way_packet_loss_is_reported(start_to, cluster):
    job = start_to(*ALONE)
    cluster.hosts[1].call('/usr/sbin/iptables', '-A', 'OUTPUT', '-j', 'DROP')
    try:
        assert_ended(job, rf'host h2 \(with rank 1\) {SILENT}')
    finally:
        cluster.hosts[1].call('/usr/sbin/iptables', '-F', 'OUTPUT')
    assert_nothing_lost(job.run_dir)


def test_killed_daemon_of_the_engine_is_the_recorded_cause(start_to, cluster):
    job = start_to()
    kill(p for p in cluster.hosts[1].pids() if words(p)[0].endswith('/orted'))
    cause = 'rank 1 on h2: the engine (mpirun, horovodrun or srun) on this host has ended'
    assert_ended(job, f'{re.escape(cause)}; {RECORDED}', code=1)
    assert causes_of(job) == [cause]


@pytest.mark.slow  # the link is lost for 60 s
def test_drill_of_a_lost_link_costs_one_restart_and_leaves_nothing(start, cluster):
    num_sshd = len(cluster.hosts[1].pids(of_sshd=True))
    job = start(*BARE, *AGAIN, '--drill', 'link:rank1@step13')
    code, output = job.end()
    assert code == 0 and 'drill link:rank1@step13: goodput' in output, output
    cause, end = causes_of(job)
    assert re.fullmatch(f'host h2 {CONTACT}', cause) and end == 'converged'
    assert [m['number_of_ranks'] for m in run_metrics(job.run_dir, 'resumed')] == [2]
    wait_for(lambda: not cluster.hosts[1].pids())
    wait_for(lambda: len(cluster.hosts[1].pids(of_sshd=True)) == num_sshd)


@pytest.mark.slow  # the limit is 120 s
def test_watcher_stopped_at_the_end_of_a_run_is_named_and_the_result_kept(start, cluster):
    job = start(*BARE, '--train.target_accuracy', 0.1)
    watcher = psutil.Process(job.rank_pid(1)).ppid()
    job.wait_for_step(1)
    os.kill(watcher, signal.SIGSTOP)
    code, output = job.end()
    assert code == 0 and causes_of(job) == ['converged'], output
    text = rf'not its processes after 120 s; waiting for .*process {watcher} .*, which is stopped'
    assert re.search(text, output), output


def test_full_disk_of_the_run_folder_is_reported(start, cluster, tmp_path):
    disk = tmp_path / 'run'
    disk.mkdir()
    with mounted(cluster.hosts, '-t', 'tmpfs', '-o', 'size=150m', 'tmpfs', disk):
        job = start(*BARE, '--checkpoint.keep', 9)
        text = r'.*step_\d+: cannot write the checkpoint: No space left on device; earlier'
        assert_ended(job, rf'rank 0 on h1, step \d+, {PHASE}: {text} ones are kept', code=2)
        assert_nothing_lost(Path(f'/proc/{cluster.hosts[0].keeper.pid}/root{disk}'))


def test_read_only_checkpoint_folder_is_reported(start_to, cluster):
    job = start_to()
    folder = job.run_dir / 'checkpoints'
    pid = job.rank_pid(0)
    os.kill(pid, signal.SIGSTOP)  # files open for writing would prevent the mount
    with mounted(cluster.hosts, '-o', 'bind,ro', folder, folder):  # permissions would not stop root
        os.kill(pid, signal.SIGCONT)
        text = rf'rank 0 on h1, step \d+, {PHASE}: .*Read-only file system; earlier ones are kept'
        assert_ended(job, text, code=2)
        assert_nothing_lost(job.run_dir)


def other_packages(folder, data):
    """Create METADATA of another numpy; return source and target of a mount."""
    target = next(Path(numpy.__file__).parent.parent.glob('numpy-*.dist-info')) / 'METADATA'
    source = folder / 'METADATA'
    text = target.read_text()
    source.write_text(text.replace(f'Version: {numpy.__version__}', 'Version: 1.22.0', 1))
    return source, target


def other_data(folder, data):
    """Create a different data set; return source and target of a mount."""
    shutil.copytree(data, folder / 'other')
    manifest = load_manifest(folder / 'other')
    dump_manifest(folder / 'other', {**manifest, 'classes': manifest['classes'][::-1]})
    return folder / 'other', data


def no_data(folder, data):
    """Create an empty folder for the data set; return source and target of a mount."""
    (folder / 'empty').mkdir()
    return folder / 'empty', data


@pytest.mark.parametrize(
    'replace, arguments, message, code',
    [
        (other_packages, (), r'failed +packages +numpy 1\.22\.0 on h2, but numpy \S+ on h1', 1),
        (other_data, (), r'failed +data set +manifest \w+ with 200 images on h2, but manifest', 1),
        (
            other_data,
            BARE,
            r'rank 1 on h2: \S+: got data with SHA-256 \w+…, expected \w+… as on',
            2,
        ),
        (no_data, BARE, r'rank 1 on h2: \S+manifest\.json: no such file; create the data with', 2),
    ],
)
def test_different_host_is_refused(
    start, cluster, tiny_config, tmp_path, replace, arguments, message, code
):
    with mounted(cluster.hosts[1:2], '--bind', *replace(tmp_path, tiny_config.parent / 'data')):
        assert_ended(start(*arguments), message, code=code)
        # the doctor runs before the run folder is created
        assert arguments or not (tmp_path / 'run').exists()


def test_host_without_ssh_is_reported(start, cluster):
    cluster.kill_sshd(cluster.hosts[1])  # until the end of the test
    cause = '(does not answer h1|was not reached: .*)'
    output = assert_ended(start(*BARE), rf'host h2 \(with rank 1\) {cause}; before a run began')
    assert 'Connection refused' in output  # the reason of ssh


def test_rank_stopped_longer_than_the_stall_limit_is_reported(start_to):
    job = start_to('--comm.stall_limit_s', 40)
    os.kill(job.rank_pid(1), signal.SIGSTOP)
    assert_ended(job, rf'rank 1 on h2, step \d+, {PHASE}: stopped \(SIGSTOP\) for \d+ s')
    assert_nothing_lost(job.run_dir)


def test_data_truncated_during_training_is_reported(start_to, tiny_config, tmp_path):
    data = tmp_path / 'data'
    shutil.copytree(tiny_config.parent / 'data', data)
    job = start_to('--data.dir', data)
    os.truncate(data / 'train.rec', 1000)
    assert_ended(
        job, r'rank \d on h\d, step \d+, \w+: .*train\.rec, record \d+: .*prepare the data'
    )
    assert_nothing_lost(job.run_dir)


def test_run_restarts_after_a_killed_rank_and_converges(start_to):
    job = start_to('--restarts', 2, '--train.target_accuracy', 0.6)
    os.kill(job.rank_pid(1), signal.SIGKILL)
    code, output = job.end()
    assert code == 0 and 'restart 1 of 2: --resume ' in output and 'converged' in output, output
    [resumed] = run_metrics(job.run_dir, 'resumed')
    assert resumed['step'] >= 5 and resumed['number_of_ranks'] == 2


@pytest.mark.parametrize('launcher', ['mpirun.sh', 'horovodrun.sh'])
def test_killed_launcher_ends_all_ranks(start_to, launcher):
    job = start_to(launcher=launcher)
    job.process.kill()  # the shell of the script has become the launcher
    job.end()
    assert_nothing_lost(job.run_dir)


def test_run_restarts_after_loss_of_sshd_in_each_phase_and_converges(start, cluster):
    job, host = start(*BARE, '--restarts', 3, '--train.target_accuracy', 0.8), cluster.hosts[1]
    for number, phase in enumerate(('training', 'evaluation', 'checkpoint'), 1):
        with job.held_in(phase):
            cluster.kill_sshd(host)
        job.wait_for(
            lambda number=number: len(re.findall(SILENT, job.output)) == number, 'the message'
        )
        cluster.start_sshd(host)
        job.wait_for_restart(number)
    code, output = job.end()
    assert code == 0, output
    steps = [m['step'] for m in run_metrics(job.run_dir, 'resumed')]
    assert len(steps) == 3 and steps == sorted(steps)  # no restart loses steps
