"""Supervisor: exit code of the launcher and contents of the run folder after any sequence of
attempts."""

import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from helpers import keep_checkpoint, launch_options, write_metrics
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.launch import attempts, supervisor
from mlperf_rn50.launch.supervisor import Placement, Supervisor
from mlperf_rn50.parser import Drill
from mlperf_rn50.runfolder.locks import LAUNCHER_LOCK, folder_lock
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import Failure, note_failure, read_attempts

HOSTS = ('h1', 'h2', 'h3')
OPTIONS = launch_options('--config', 'c.yaml', '--no-doctor', '--hosts', ','.join(HOSTS))

# A start of the ranks: whether the run begins, steps gained, status in the log, exit code, whether
# there is a stop request, and the hosts that are unreachable afterwards.
starts = st.builds(
    dict,
    begins=st.booleans(),
    steps=st.integers(0, 2),
    end=st.sampled_from([None, None, None, 'converged', 'aborted', 'failed', 'interrupted']),
    code=st.sampled_from([0, 1, 2, 75, 137]),
    has_stop=st.sampled_from([False, False, False, True]),
    silent=st.sets(st.sampled_from(HOSTS), max_size=3),
)


def attempt(code, end=None, steps=0, begins=True, has_stop=False, silent=(), **keys):
    """Return the script of a start of the ranks. Further keys: cause, host (blames) and rank of a
    failure, and whether it is_outside; step that it reaches; is_forced after a second Ctrl-C;
    returned hosts, which answer again during the start."""
    script = {'code': code, 'end': end, 'steps': steps, 'begins': begins, 'has_stop': has_stop}
    return script | {'silent': set(silent), **keys}


CONVERGES, GAINS, STUCK = attempt(0, 'converged', 1), attempt(1, steps=1), attempt(1)
FIT, UNFIT = attempt(0, begins=False), attempt(1, begins=False)  # results of the doctor


class Fake:
    """Hosts whose ranks follow a script and then converge; it writes the files that ranks would
    write."""

    is_forced = False

    def __init__(self, folder, *script):
        self.folder, self.script = folder, list(script)
        self.is_requested, self.silent, self.paused, self.num_looks = False, set(), 0.0, 0
        self.messages, self.calls, self.statuses, self.stops = [], [], [], []

    @property
    def trace(self):
        """A letter for each start: d for the doctor, t for train; a capital if h2 is left out."""
        letters = ((words[0][0], hosts) for hosts, words in self.calls)
        return ''.join(x.upper() if hosts == ('h1', 'h3') else x for x, hosts in letters)

    def start(self, layout, job, words, status, should_stop):
        self.calls.append((layout.hosts, words))
        before = status and status()
        todo = self.script.pop(0) if self.script else CONVERGES
        self.is_requested |= todo['has_stop']
        self.is_forced |= todo.get('is_forced', False)
        self.silent, self.returned = todo['silent'], todo.get('returned', set())
        self.stops.append(should_stop())
        if 'blames' in todo:
            self.folder.mkdir(exist_ok=True)
            keys = {k: todo[k] for k in ('rank', 'is_outside') if k in todo}
            failure = Failure(job, todo['blames'], todo.get('cause', 'killed'), **keys)
            note_failure(self.folder, failure)
        if todo['begins']:
            self.write('--resume' in words, todo)
        self.statuses.append((before, status and status()))
        return todo['code']

    def write(self, is_resumed, todo):
        run = RunFolder(self.folder, len(list(self.folder.glob('result_*.txt'))) - is_resumed)
        self.folder.mkdir(exist_ok=True)
        run.result.touch()
        step = len(list(run.checkpoints.glob('step_*')))
        steps = range(step + 1, step + 1 + todo['steps'])
        for k in steps:
            keep_checkpoint(run, k)
        reached = [*steps, todo['reaches']] if 'reaches' in todo else steps
        if todo.get('is_writing'):
            (run.checkpoints / '.step_00000009.1.tmp').mkdir()
        events = [{'event': 'resumed', 'step': step}] if is_resumed else []
        events += [{'event': 'train', 'step': k} for k in reached]
        events += [{'event': 'end', 'status': todo['end']}] if todo['end'] else []
        write_metrics(run, *events)

    def find_silent(self, hosts):
        self.num_looks += 1
        return {h: '' for h in hosts if h in self.silent}

    def pause(self, seconds):
        self.paused += seconds
        self.silent = set()  # hosts become reachable again during a pause

    def run(self, first_run=0, **options):
        """Supervise a run, and read what it recorded; return its exit code."""
        supervisor = Supervisor(
            start=self.start,
            silent=self.find_silent,
            returned=lambda hosts: self.returned.intersection(hosts),
            say=self.messages.append,
            signals=self,
            options=replace(OPTIONS, **options),
            placement=Placement(self.folder, HOSTS, 1),
            batch_job='batch',
            token='token',
            first_run=first_run,
        )
        code = supervisor.run_all()
        self.attempts = read_attempts(self.folder, 'batch')
        return code


def end_of(todo, hosts):
    """Return the logged status of a start, or None; a lost host causes interruptions without a stop
    request."""
    is_killed = todo['code'] == EXIT_FAILED or todo['code'] > 128
    has_lost = is_killed or bool(todo['silent'] & set(hosts))
    is_lost = todo['end'] == 'interrupted' and has_lost and not todo['has_stop']
    return todo['end'] if todo['begins'] and not is_lost else None


def fake_run(script, **options):
    with tempfile.TemporaryDirectory() as name:
        world = Fake(Path(name) / 'run', *script)
        code = world.run(**options)
        world.has_checkpoint = bool(list(world.folder.glob('checkpoints*/step_*')))
    return code, world


@given(st.lists(starts, max_size=8), st.integers(0, 8), st.booleans())
def test_exit_code_of_launcher_matches_run_folder(script, restarts, is_elastic):
    code, world = fake_run(script, restarts=restarts, elastic=is_elastic)
    done = script[: len(world.calls)] + [CONVERGES] * (len(world.calls) - len(script))
    *ends, end = [end_of(d, hosts) for d, (hosts, _) in zip(done, world.calls)]
    *others, last = done
    assert len(ends) <= restarts and set(ends) <= {None}  # no restart after a run has ended
    # nor after a stop request or a usage error
    assert not any(d['has_stop'] or d['code'] == EXIT_USAGE for d in others)
    if end in ('converged', 'aborted', 'failed'):
        assert code == (EXIT_OK if end == 'converged' else EXIT_FAILED)
    elif end or last['has_stop']:  # interrupted
        is_refused = end == 'interrupted' and last['code'] == EXIT_USAGE  # such as a full disk
        resumable = EXIT_RESUMABLE if world.has_checkpoint else EXIT_FAILED
        assert code == (EXIT_USAGE if is_refused else resumable)
    else:
        assert code == (EXIT_USAGE if last['code'] == EXIT_USAGE else EXIT_FAILED)
    assert all(a.cause for a in world.attempts)


@given(
    st.lists(st.tuples(starts, st.sets(st.sampled_from(HOSTS), max_size=2)), max_size=25),
    st.integers(1, 3),
)
def test_elastic_start_has_hosts_and_a_new_run_the_number_of_all(script, seeds):
    with patch.multiple(supervisor, ELASTIC_LIMIT_S=0.0, _WAIT_LIMIT_S=0.0):
        dones = [{**done, 'returned': returned} for done, returned in script]
        _, world = fake_run(dones, restarts=5, seeds=seeds, elastic=True, doctor=True)
    for hosts, words in world.calls:
        assert hosts and hosts == tuple(h for h in HOSTS if h in hosts)
        num_nodes = 3 if words[:2] == ['train', '--config'] else len(hosts)
        assert words[words.index('--run.num_nodes') + 1] == str(num_nodes)


KILLED = attempt(1, blames='h2', rank=1, cause='killed by signal 9 (SIGKILL)', is_outside=True)
CUT = attempt(1, blames='h2', cause='had no contact to the launcher for 20 s', is_outside=True)
BROKEN = attempt(1, blames='h2', rank=1, cause='no memory for 64 GB')
BLAMED = attempt(1, blames='h2')
GONE, STATUS_205 = (attempt(code, silent={'h2'}) for code in (EXIT_FAILED, 205))
# A run that is interrupted because a host is lost.
LOST = attempt(EXIT_FAILED, 'interrupted', 1, silent={'h2'})
SILENT = f'host h2 (with rank 1) does not answer {platform.node()}; '
SAME = 'two attempts in a row ended with the same failure (step 0, start-up); not restarted'
EXCLUDED = 'excluding h2 after 2 failures in attempts without a newer checkpoint'


def outcome(code, trace, *script, message='', restarts=20, **options):
    """Return a case: exit code and trace of a script with some options, and texts of messages."""
    return code, trace, script, {'restarts': restarts, **options}, message


@pytest.mark.parametrize(
    'code, trace, script, options, message',
    [
        # attempts without progress are limited
        *(outcome(EXIT_FAILED, 't' * (n + 1), *[STUCK] * 9, restarts=n) for n in (0, 1, 2)),
        outcome(EXIT_FAILED, 'ttt', *[STUCK] * 9, message='wrote no newer checkpoint'),
        outcome(EXIT_OK, 't' * 10, *[GAINS] * 9),
        # unless their cause was outside, and before a step
        *(
            outcome(EXIT_OK, 't' * 10, *[fault] * 9)
            for fault in (KILLED, CUT, attempt(137), {**CUT, 'begins': False})
        ),
        outcome(EXIT_FAILED, 'ttt', *[{**KILLED, 'reaches': 4}] * 9),
        outcome(EXIT_FAILED, 'ttt', *[{**CUT, 'reaches': 4}] * 9),
        # the same failure at the same step ends after two
        outcome(EXIT_FAILED, 'tt', BROKEN, {**BROKEN, 'cause': 'no memory for 9 GB'}, message=SAME),
        outcome(EXIT_FAILED, 'ttt', *[BROKEN, {**BROKEN, 'reaches': 7}] * 3),
        outcome(EXIT_FAILED, 'ttt', *[BROKEN, {**BROKEN, 'cause': 'no file'}] * 3),
        outcome(EXIT_FAILED, 'ttttt', *[BROKEN, KILLED] * 3),
        # an interruption by the loss of a host is a failure
        outcome(EXIT_OK, 'tt', LOST, message=SILENT),
        outcome(EXIT_FAILED, 't', LOST, message=SILENT, restarts=0),
        outcome(EXIT_OK, 'tt', {**LOST, 'code': EXIT_RESUMABLE}),
        outcome(EXIT_RESUMABLE, 't', {**LOST, 'code': EXIT_RESUMABLE, 'silent': set()}),
        # a second Ctrl-C keeps the result of a finished run
        outcome(EXIT_OK, 't', attempt(137, 'converged', 1, has_stop=True, is_forced=True)),
        *(
            outcome(EXIT_AT_ONCE, 't', attempt(137, end, 1, has_stop=True, is_forced=True))
            for end in ('aborted', 'interrupted', None)
        ),
        # a doctor that loses a rank counts as an attempt, also the first one
        *(
            outcome(code, trace, {**lost, 'begins': False}, FIT, doctor=True, restarts=n)
            for lost in (attempt(137), KILLED, BLAMED, GONE, STATUS_205)
            for code, trace, n in ((EXIT_OK, 'ddt', 3), (EXIT_FAILED, 'd', 0))
        ),
        # a failed doctor counts as an attempt, except the first one
        outcome(EXIT_OK, 'dtddt', FIT, GAINS, UNFIT, FIT, doctor=True),
        outcome(EXIT_FAILED, 'd', UNFIT, doctor=True),
        # the doctor is repeated unless all hosts passed and answer
        outcome(EXIT_OK, 'dtt', FIT, KILLED, doctor=True),
        outcome(EXIT_OK, 'dtt', FIT, CUT, doctor=True),
        outcome(EXIT_OK, 'dtt', FIT, attempt(9, steps=1), doctor=True),  # an ssh client of mpirun
        *(
            outcome(EXIT_OK, 'dtdt', FIT, fault, FIT, doctor=True)
            for fault in (BROKEN, STUCK, attempt(9), {**CUT, 'silent': {'h2'}})
        ),
        # elastic waits for a host that soon answers, and excludes one that fails twice
        outcome(EXIT_OK, 'tt', GONE, elastic=True),
        outcome(EXIT_OK, 'ttT', BROKEN, BROKEN, message=f'{EXCLUDED} (no memory', elastic=True),
        outcome(EXIT_OK, 'ttT', BLAMED, BLAMED, message=f'{EXCLUDED} (kill', elastic=True),
        outcome(
            *(EXIT_OK, 'ddDT', *[{**BLAMED, 'begins': False}] * 2, FIT),
            message=EXCLUDED,
            elastic=True,
            doctor=True,
        ),
    ],
)
def test_starts_and_exit_code_of_a_launcher(code, trace, script, options, message):
    got, world = fake_run(script, **options)
    assert (got, world.trace) == (code, trace)
    assert message in '\n'.join(world.messages)


def test_run_folder_that_vanished_with_its_mount_gets_no_new_run(tmp_path):
    world = Fake(tmp_path / 'run', attempt(1, begins=False))
    with folder_lock(world.folder):
        start = world.start

        def unmount(*words):
            (world.folder / LAUNCHER_LOCK).unlink()
            return start(*words)

        world.start = unmount
        assert world.run(restarts=5) == EXIT_FAILED
    assert world.trace == 't' and 'has vanished' in world.messages[-1]


def test_origin_and_cause_of_attempts_are_recorded():
    code, world = fake_run(
        [{**CUT, 'end': 'interrupted', 'code': 75}, CUT], restarts=5, elastic=True
    )
    assert (code, world.trace) == (EXIT_OK, 'ttT')
    cause = 'had no contact to the launcher for 20 s'
    assert [(a.cause, a.origin) for a in world.attempts] == [
        *[(f'host h2 {cause}', 'outside')] * 2,
        ('converged', ''),
    ]
    text = f'host h2 (with rank 1) {cause}; last recorded: step 0, start-up'
    assert world.messages.count(text) == 2


def test_elastic_excludes_a_host_that_stays_silent(monkeypatch):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    code, world = fake_run([GONE], restarts=1, elastic=True)
    assert (code, world.trace) == (EXIT_OK, 'tT')


GROWS = attempt(EXIT_RESUMABLE, 'interrupted', 1, returned={'h2'})


@pytest.mark.parametrize(
    'code, trace, script, options, message',
    [
        # the ranks are stopped for a returned host, without the use of a restart
        outcome(EXIT_OK, 'tTt', GONE, GROWS, message='to take back h2, which', restarts=1),
        outcome(EXIT_OK, 'dtDTdt', FIT, GONE, FIT, GROWS, FIT, restarts=1, doctor=True),
        outcome(EXIT_OK, 'tTtTt', GONE, GROWS, {**GONE, 'steps': 1}, GROWS, restarts=2),
        outcome(EXIT_FAILED, 'tTt', GONE, GROWS, GAINS, restarts=1),
        # a host that is silent again at the restart is taken back later
        outcome(EXIT_OK, 'tTTt', GONE, {**GROWS, 'silent': {'h2'}}, GROWS, restarts=1),
        # it stays out if the start with it fails before a step
        *(
            outcome(EXIT_OK, 'tTtT', GONE, GROWS, fault, GROWS | CONVERGES, restarts=1)
            for fault in (STUCK, GONE, attempt(EXIT_USAGE, begins=False), attempt(1, 'failed'))
        ),
        outcome(
            *(EXIT_OK, 'dtDTdDT', FIT, GONE, FIT, GROWS, UNFIT, FIT),
            message='excluding h2 until the end',
            restarts=1,
            doctor=True,
        ),
        # a host that returns and is silent again, twice, stays out
        outcome(
            *(EXIT_OK, 'tTTTT', GONE, *[{**GROWS, 'silent': {'h2'}}] * 2),
            {**GAINS, 'returned': {'h2'}},
            restarts=2,
        ),
        # the loss of another host says nothing of it, and the last host is not excluded
        outcome(EXIT_OK, 'tTtt', GONE, GROWS, attempt(1, silent={'h1'}), restarts=2),
        outcome(EXIT_OK, 'tTtt', GONE, {**GROWS, 'silent': {'h1', 'h3'}}, STUCK, restarts=3),
        # its failure does not count against the run
        outcome(EXIT_OK, 'tTtTTT', GONE, GROWS, *[STUCK] * 3, restarts=9),
        # a run that begins without a host
        outcome(EXIT_OK, 'tT', GONE, restarts=1),
        # a host that failed twice while it answered stays out
        outcome(EXIT_OK, 'ttT', BROKEN, BROKEN, GROWS | CONVERGES),
        # it is also taken back by the restart after a failure, and at the next run
        outcome(EXIT_OK, 'tTt', GONE, {**GAINS, 'returned': {'h2'}}, restarts=2),
        outcome(EXIT_OK, 'tTt', GONE, restarts=1, seeds=2),
        # the end of the run and a stop request come first
        outcome(EXIT_OK, 'tT', GONE, GROWS | CONVERGES),
        outcome(EXIT_RESUMABLE, 'tT', GONE, {**GROWS, 'has_stop': True}),
    ],
)
def test_elastic_takes_back_a_host_that_answers_again(
    monkeypatch, code, trace, script, options, message
):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    got, world = fake_run(script, elastic=True, **options)
    assert (got, world.trace) == (code, trace)
    assert message in '\n'.join(world.messages)


def test_host_that_answers_again_replaces_the_last_ones(monkeypatch):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    monkeypatch.setattr(supervisor, '_WAIT_LIMIT_S', 0.0)
    lost = attempt(1, steps=1, silent={'h1', 'h3'})
    code, world = fake_run([GONE, lost], restarts=2, elastic=True)
    hosts = [hosts for hosts, _ in world.calls]
    assert (code, hosts) == (EXIT_OK, [HOSTS, ('h1', 'h3'), ('h2',)])


def test_stop_for_a_returned_host_is_recorded_as_no_failure(monkeypatch):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    _, world = fake_run([GONE, GROWS], elastic=True, restarts=1)
    assert world.stops == [False, True, False]
    ends = [(a.end, a.cause, a.origin) for a in world.attempts[1:]]
    assert ends == [('interrupted', 'stopped to take back h2', ''), ('converged', 'converged', '')]
    assert sum('restart 1 of 1' in message for message in world.messages) == 1


def test_elastic_never_excludes_all_hosts(monkeypatch):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    code, world = fake_run([attempt(EXIT_FAILED, silent=HOSTS)], restarts=1, elastic=True)
    assert (code, world.trace) == (EXIT_OK, 'tt') and 'excluding' not in ''.join(world.messages)


def test_earlier_stop_does_not_count_for_resumed_run(tmp_path):
    stopped = attempt(75, 'interrupted', 1, has_stop=True)
    world = Fake(tmp_path / 'run', stopped, attempt(137, begins=False))
    assert world.run() == EXIT_RESUMABLE
    world.is_requested = False
    assert world.run(resume=True) == EXIT_FAILED  # and not 75


def test_resume_continues_the_set_of_seeds(tmp_path):
    world = Fake(tmp_path / 'run', CONVERGES, attempt(75, 'interrupted', 1, has_stop=True))
    assert world.run(seeds=4) == EXIT_RESUMABLE
    world.is_requested = False
    assert world.run(seeds=4, resume=True) == EXIT_OK
    assert ['--resume' in words for _, words in world.calls] == [False, False, True, False, False]


@pytest.mark.parametrize(
    'script, resumes',
    [
        ([CONVERGES, attempt(75, 'interrupted', 1, has_stop=True)], [False, False, True]),
        ([attempt(75, begins=False, has_stop=True)], [False, False, False]),
    ],
)
def test_requeued_job_leaves_older_runs_alone(tmp_path, script, resumes):
    older = attempt(75, 'interrupted', 1)
    world = Fake(tmp_path / 'run', older, older, *script)
    for _ in range(2):
        world.run()
    del world.calls[:]
    world.run(seeds=2, first_run=2)
    world.is_requested = False
    assert world.run(seeds=2, resume=True, first_run=2) == EXIT_OK
    assert ['--resume' in words for _, words in world.calls] == resumes


def test_chosen_run_is_resumed_though_a_job_has_later_ones(tmp_path):
    older, newer = (RunFolder(tmp_path / 'run', number) for number in range(2))
    world = Fake(tmp_path / 'run', *[attempt(75, 'interrupted', 1)] * 2)
    for _ in range(2):
        world.run()
    assert newer.result.exists()
    world.run(first_run=2, run=older, resume=str(older.checkpoints))
    assert world.calls[-1][1][:3] == ['train', '--resume', str(older.checkpoints)]


def test_set_of_seeds_keeps_the_worst_exit_code_over_a_resume(tmp_path):
    world = Fake(tmp_path / 'run', attempt(1, 'aborted', 1), attempt(75, 'interrupted', 1))
    assert world.run(seeds=2) == EXIT_RESUMABLE
    assert [world.run(seeds=2, resume=True) for _ in range(2)] == [EXIT_FAILED] * 2
    assert len(world.calls) == 3 and 'all 2 runs of --seeds have ended' in world.messages


def test_stop_request_to_the_ranks_ends_the_set_of_seeds(tmp_path):
    world = Fake(tmp_path / 'run', attempt(75, 'interrupted', 1))
    assert world.run(seeds=2) == EXIT_RESUMABLE
    assert world.run(seeds=2, resume=True) == EXIT_OK
    assert ['--resume' in words for _, words in world.calls] == [False, True, False]


def test_stop_whose_checkpoint_cannot_be_written_ends_the_set_of_seeds(tmp_path):
    for of_ranks, code in ((EXIT_RESUMABLE, EXIT_FAILED), (EXIT_USAGE, EXIT_USAGE)):
        world = Fake(tmp_path / f'{of_ranks}', attempt(of_ranks, 'interrupted'))
        assert world.run(seeds=2) == code and len(world.calls) == 1


def test_failures_of_a_run_do_not_count_against_the_next_one():
    code, world = fake_run([*[STUCK] * 3, STUCK], restarts=5, seeds=2)
    assert (code, world.trace) == (EXIT_FAILED, 'ttttt')  # of the first run


@pytest.mark.parametrize('seeds', [2, 3])
def test_run_stopped_in_its_doctor_is_not_over(seeds):
    stopped = attempt(130, begins=False, has_stop=True)
    code, world = fake_run([FIT, CONVERGES, stopped], doctor=True, seeds=seeds)
    assert code == EXIT_RESUMABLE and f'stopped after 1 of {seeds} runs' in world.messages


@pytest.mark.parametrize('is_writing', [True, False])
def test_run_that_writes_a_checkpoint_has_not_ended(is_writing):
    _, world = fake_run([attempt(75, 'interrupted', 1, has_stop=True, is_writing=is_writing)])
    assert world.statuses == [(None, '' if is_writing else 'interrupted')]


def test_run_that_begins_without_a_host_has_the_learning_rate_of_all(monkeypatch):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    _, world = fake_run([FIT, GONE, FIT], restarts=1, elastic=True, doctor=True)
    nodes = [words[words.index('--run.num_nodes') + 1] for _, words in world.calls]
    assert nodes == ['3', '3', '2', '3']
    assert ['--elastic' in words for _, words in world.calls] == [False, False, True, True]


def test_fault_at_the_first_start_of_each_run_is_no_failed_attempt():
    code, world = fake_run([FIT, CONVERGES, UNFIT], restarts=5, doctor=True, seeds=2)
    assert (code, world.trace) == (EXIT_FAILED, 'dtd')


def test_stop_request_at_the_end_of_a_run_leaves_the_other_runs(tmp_path):
    world = Fake(tmp_path / 'run', attempt(0, 'converged', 1, has_stop=True))
    assert world.run(seeds=2) == EXIT_RESUMABLE
    world.is_requested = False
    assert world.run(seeds=2, resume=True) == EXIT_OK
    assert ['--resume' in words for _, words in world.calls] == [False, False]


def test_older_run_is_resumed_from_the_given_checkpoint_and_later_from_its_newest(tmp_path):
    old, new = (RunFolder(tmp_path, number) for number in range(2))
    for run, end in ((old, 'interrupted'), (new, 'converged')):
        keep_checkpoint(run, 2)
        run.result.touch()
        write_metrics(run, {'event': 'end', 'status': end})
    keep_checkpoint(old, 1)
    given, paths = old.checkpoints / 'step_00000001', []

    def start(layout, job, words, status, should_stop):
        paths.append(words[words.index('--resume') + 1])
        assert status() is None
        write_metrics(old, {'event': 'resumed', 'step': 1})
        assert status() == ''
        match len(paths):
            case 1:
                (old.checkpoints / 'step_00000002').rmdir()  # as train does, because it is later
            case 2:
                keep_checkpoint(old, 3)
            case 3:
                write_metrics(old, {'event': 'end', 'status': 'converged'})
                assert status() == 'converged'
        return 1

    world = Fake(tmp_path)
    world.start = start
    code = world.run(config=None, run_dir=str(tmp_path), resume=str(given), run=old, restarts=5)
    assert (code, paths) == (EXIT_OK, [str(given), str(given), str(old.checkpoints)])
    assert [a.run for a in world.attempts] == [0, 0, 0]


def test_stop_request_before_start_starts_nothing(tmp_path):
    world = Fake(tmp_path / 'run')
    world.is_requested = True
    assert world.run(doctor=True) == EXIT_FAILED
    assert not world.calls and not world.folder.exists()


def test_fault_of_a_drill_is_caused_in_the_first_start_only():
    _, world = fake_run([GAINS], restarts=1, drill=Drill('kill', rank=1, step=5))
    first, second = (words for _, words in world.calls)
    assert first[-2:] == ['--drill', 'kill:rank1@step5'] and '--drill' not in second


@pytest.mark.parametrize('fault, num_looks', [(KILLED, 1), (GONE, 3), (STUCK, 2)])
def test_hosts_that_have_just_answered_are_not_asked_again(fault, num_looks):
    """The others are asked once more, at least after a pause."""
    _, world = fake_run([fault], restarts=1)
    assert world.num_looks == num_looks


def test_goodput_follows_the_run_of_the_drill_only(monkeypatch):
    monkeypatch.setattr(attempts, 'read_run', lambda path, is_own: path)
    monkeypatch.setattr(attempts, 'read_goodput', lambda run: SimpleNamespace(text=run.name))
    _, world = fake_run([GAINS], restarts=1, seeds=2, drill=Drill('kill', rank=1, step=5))
    assert [m for m in world.messages if 'goodput' in m] == [
        'drill kill:rank1@step5: goodput result_0.txt'
    ]


def test_drill_whose_step_is_not_reached_says_so():
    _, world = fake_run([CONVERGES], drill=Drill('kill', rank=1, step=500))
    assert 'drill kill:rank1@step500: the fault did not happen in this run' in world.messages


def test_drill_before_the_first_checkpoint_says_that_a_run_is_lost(monkeypatch):
    monkeypatch.setattr(attempts, 'read_run', lambda path, is_own: path)
    monkeypatch.setattr(attempts, 'read_goodput', lambda run: SimpleNamespace(text=run.name))
    _, world = fake_run([STUCK], restarts=1, drill=Drill('kill', rank=1, step=5))
    [text] = [m for m in world.messages if 'goodput' in m]
    assert 'goodput result_1.txt; before it, the fault ended a run' in text
