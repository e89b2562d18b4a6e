"""Supervisor: exit code of the launcher and contents of the run folder after any sequence of
attempts."""

import json
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import keep_checkpoint, launch_options, write_metrics
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.launch import supervisor
from mlperf_rn50.launch.attempts import MAX_STUCK
from mlperf_rn50.launch.supervisor import Placement, Supervisor
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import Failure, note_failure

HOSTS = ('h1', 'h2', 'h3')
OPTIONS = launch_options('--config', 'c.yaml', '--no-doctor')

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
    failure, and whether it is_outside; step that it reaches; is_forced after a second Ctrl-C."""
    script = {'code': code, 'end': end, 'steps': steps, 'begins': begins, 'has_stop': has_stop}
    return script | {'silent': set(silent), **keys}


CONVERGES, GAINS, STUCK = attempt(0, 'converged', 1), attempt(1, steps=1), attempt(1)
FIT, UNFIT = attempt(0, begins=False), attempt(1, begins=False)  # results of the doctor


class Fake:
    """Hosts whose ranks follow a script and then converge; it writes the files that ranks would
    write."""

    is_forced = False

    def __init__(self, folder, script):
        self.folder, self.script = folder, list(script)
        self.is_requested, self.silent, self.paused = False, set(), 0.0
        self.messages, self.calls = [], []

    @property
    def commands(self):
        return [words[0] for _, words in self.calls]

    @property
    def hosts(self):
        return [hosts for hosts, _ in self.calls]

    def start(self, layout, job, words, status):
        self.calls.append((layout.hosts, list(words)))
        todo = self.script.pop(0) if self.script else CONVERGES
        self.is_requested |= todo['has_stop']
        self.silent = todo['silent']
        if 'blames' in todo:
            self.folder.mkdir(exist_ok=True)
            keys = {k: todo[k] for k in ('rank', 'is_outside') if k in todo}
            failure = Failure(job, todo['blames'], todo.get('cause', 'killed'), **keys)
            note_failure(self.folder, failure)
        self.is_forced |= todo.get('is_forced', False)
        if todo['begins']:
            self.write(words, todo)
        return todo['code']

    def write(self, words, todo):
        number = len(list(self.folder.glob('result_*.txt')))
        run = RunFolder(self.folder, number - ('--resume' in words))
        self.folder.mkdir(exist_ok=True)
        run.result.touch()
        step = len(list(run.checkpoints.glob('step_*')))
        steps = range(step + 1, step + 1 + todo['steps'])
        for k in steps:
            keep_checkpoint(run, k)
        if '--resume' in words:
            write_metrics(run, {'event': 'resumed', 'step': step})
        write_metrics(run, *({'event': 'train', 'step': k} for k in steps))
        if 'reaches' in todo:
            write_metrics(run, {'event': 'train', 'step': todo['reaches']})
        if todo['end']:
            write_metrics(run, {'event': 'end', 'status': todo['end']})

    def pause(self, seconds):
        self.paused += seconds
        self.silent = set()  # hosts become reachable again during a pause

    def supervisor(self, **options):
        return Supervisor(
            start=self.start,
            silent=lambda hosts: {h: '' for h in hosts if h in self.silent},
            say=self.messages.append,
            signals=self,
            options=replace(OPTIONS, **options),
            place=Placement(self.folder, HOSTS, 1),
            has_ssh=True,
            batch_job='batch',
            token='token',
        )


def end_of(todo, hosts):
    """Return the logged status of a start, or None; a lost host causes interruptions without a stop
    request."""
    has_lost = todo['code'] == EXIT_FAILED or bool(todo['silent'] & set(hosts))
    is_lost = todo['end'] == 'interrupted' and has_lost and not todo['has_stop']
    return todo['end'] if todo['begins'] and not is_lost else None


def fake_run(script, **options):
    with tempfile.TemporaryDirectory() as name:
        world = Fake(Path(name) / 'run', script)
        code = world.supervisor(**options).run_all()
        world.has_checkpoint = bool(list(world.folder.glob('checkpoints*/step_*')))
        world.attempts = [
            json.loads(line) for line in text_of(world.folder / 'attempts.jsonl').splitlines()
        ]
    return code, world


def text_of(path):
    return path.read_text() if path.exists() else ''


@given(st.lists(starts, max_size=8), st.integers(0, 8), st.booleans())
def test_exit_code_of_launcher_matches_run_folder(script, restarts, is_elastic):
    code, world = fake_run(script, restarts=restarts, elastic=is_elastic)
    done = script[: len(world.calls)] + [CONVERGES] * (len(world.calls) - len(script))
    ends = [end_of(d, hosts) for d, (hosts, _) in zip(done, world.calls)]
    last = done[-1]
    assert 1 <= len(world.calls) <= 1 + restarts
    assert all(not d['has_stop'] for d in done[:-1])  # no restart after a stop request
    assert all(end is None for end in ends[:-1])  # nor after a run has ended
    assert all(d['code'] != EXIT_USAGE for d in done[:-1])  # nor after a usage error
    end = ends[-1]
    if end:
        assert code == {'converged': EXIT_OK, 'interrupted': EXIT_RESUMABLE}.get(end, EXIT_FAILED)
    elif last['has_stop']:
        assert code in (EXIT_RESUMABLE, EXIT_FAILED)
    else:
        assert code in (EXIT_FAILED, EXIT_USAGE) and (code == EXIT_USAGE) == (
            last['code'] == EXIT_USAGE
        )
    assert code != EXIT_OK or end == 'converged'
    assert code != EXIT_RESUMABLE or world.has_checkpoint or end == 'interrupted'
    assert all(a['cause'] for a in world.attempts)


@pytest.mark.parametrize('restarts', [0, 1, MAX_STUCK - 1, MAX_STUCK, 20])
def test_only_attempts_without_progress_are_limited(restarts):
    code, world = fake_run([STUCK] * 30, restarts=restarts)
    assert code == EXIT_FAILED and len(world.calls) == min(1 + restarts, MAX_STUCK)
    assert restarts < MAX_STUCK or 'wrote no newer checkpoint' in world.messages[-1]
    code, world = fake_run([GAINS] * 9, restarts=20)
    assert code == EXIT_OK and len(world.calls) == 10 and world.paused == 0


def test_earlier_stop_does_not_count_for_resumed_run(tmp_path):
    world = Fake(
        tmp_path / 'run', [attempt(75, 'interrupted', 1, has_stop=True), attempt(137, begins=False)]
    )
    assert world.supervisor().run_all() == EXIT_RESUMABLE
    world.is_requested = False
    assert world.supervisor(resume=True).run_all() == EXIT_FAILED  # and not 75


def test_run_interrupted_by_lost_host_is_restarted():
    lost = attempt(EXIT_FAILED, 'interrupted', 1, silent={'h2'})
    code, world = fake_run([lost], restarts=1)
    assert code == EXIT_OK and len(world.calls) == 2
    assert any(
        m.startswith(f'host h2 (with rank 1) does not answer {platform.node()}; ')
        for m in world.messages
    )
    assert fake_run([lost])[0] == EXIT_FAILED
    assert fake_run([dict(lost, code=EXIT_RESUMABLE)], restarts=1)[0] == EXIT_OK
    assert (
        fake_run([dict(lost, code=EXIT_RESUMABLE, silent=set())], restarts=1)[0] == EXIT_RESUMABLE
    )


def test_run_has_begun_once_its_folder_exists_and_ended_once_it_says_so(tmp_path):
    seen = []

    class Recording(Fake):
        def start(self, layout, job, words, status):
            before = status and status()
            code = super().start(layout, job, words, status)
            seen.append((words[0], before, status and status()))
            return code

    world = Recording(tmp_path / 'run', [FIT, GAINS, FIT])
    assert world.supervisor(doctor=True, restarts=1).run_all() == EXIT_OK
    assert seen == [
        ('doctor', None, None),
        ('train', None, ''),
        ('doctor', None, None),
        ('train', None, 'converged'),
    ]


def test_older_run_is_resumed_from_the_given_checkpoint_and_later_from_its_newest(tmp_path):
    runs = [RunFolder(tmp_path, number) for number in range(2)]
    for run, end in zip(runs, ('interrupted', 'converged')):
        keep_checkpoint(run, 2)
        run.result.touch()
        write_metrics(run, {'event': 'end', 'status': end})
    given, paths = runs[0].checkpoints / 'step_00000001', []
    given.mkdir()

    def start(layout, job, words, status):
        paths.append(words[words.index('--resume') + 1])
        assert status() is None
        events = [{'event': 'resumed', 'step': 1}]
        if len(paths) > 2:
            events.append({'event': 'end', 'status': 'converged'})
        if len(paths) == 1:
            (runs[0].checkpoints / 'step_00000002').rmdir()  # as train does, because it is later
        if len(paths) == 2:
            (runs[0].checkpoints / 'step_00000003').mkdir()
        write_metrics(runs[0], *events)
        assert status() == ('converged' if len(paths) > 2 else '')
        return 1

    world = Fake(tmp_path, [])
    world.start = start
    supervised = world.supervisor(
        config=None, run_dir=str(tmp_path), resume=str(given), run=runs[0], restarts=5
    )
    supervised.place = replace(supervised.place, run_dir=tmp_path)
    assert supervised.run_all() == EXIT_OK
    assert paths == [str(given), str(given), str(runs[0].checkpoints)]
    assert [
        json.loads(line)['run'] for line in text_of(tmp_path / 'attempts.jsonl').splitlines()
    ] == [0, 0, 0]


@pytest.mark.parametrize(
    'lost',
    [
        dict(code=137),
        dict(code=1, blames='h2', rank=1, is_outside=True),
        dict(code=205, silent={'h2'}),
        dict(code=EXIT_FAILED, silent={'h2'}),
        dict(code=EXIT_FAILED, blames='h2', rank=1),
    ],
)
def test_first_doctor_that_loses_a_rank_counts_as_attempt(lost):
    lost = attempt(begins=False, **lost)
    code, world = fake_run([lost, FIT], doctor=True, restarts=3)
    assert code == EXIT_OK and world.commands == ['doctor', 'doctor', 'train']
    code, world = fake_run([lost], doctor=True)
    assert code == EXIT_FAILED and len(world.calls) == 1
    assert any('host h2 (with rank 1)' in m for m in world.messages) == bool(lost['silent'])


def test_failed_doctor_of_restart_counts_as_attempt_without_progress():
    code, world = fake_run([FIT, GAINS, UNFIT, FIT], doctor=True, restarts=3)
    assert code == EXIT_OK
    assert world.commands == 'doctor train doctor doctor train'.split()
    code, world = fake_run([UNFIT], doctor=True, restarts=3)
    assert code == EXIT_FAILED and len(world.calls) == 1  # the first failure is reported at once


KILLED = attempt(1, blames='h2', rank=1, cause='killed by signal 9 (SIGKILL)', is_outside=True)
CUT = attempt(1, blames='h2', cause='had no contact to the launcher for 20 s', is_outside=True)
BROKEN = attempt(1, blames='h2', rank=1, cause='no memory for 64 GB')


@pytest.mark.parametrize('fault', [KILLED, CUT, attempt(137), dict(CUT, begins=False)])
def test_outside_causes_before_the_first_step_do_not_count(fault):
    code, world = fake_run([fault] * 9, restarts=20)
    assert code == EXIT_OK and len(world.calls) == 10
    assert not any('waiting' in m for m in world.messages)
    assert [a['origin'] for a in world.attempts] == ['outside'] * 9 + ['']


@pytest.mark.parametrize('fault', [dict(KILLED, reaches=4), dict(CUT, reaches=4)])
def test_outside_causes_after_a_step_count(fault):
    code, world = fake_run([fault] * 9, restarts=20)
    assert code == EXIT_FAILED and len(world.calls) == MAX_STUCK


@pytest.mark.parametrize(
    'second, num_calls',
    [
        (BROKEN, 2),
        (dict(BROKEN, cause='no memory for 65 GB'), 2),
        (dict(BROKEN, reaches=7), 3),
        (dict(BROKEN, cause='no file'), 3),
        (KILLED, 5),
    ],
)
def test_same_failure_at_the_same_step_ends_after_two(second, num_calls):
    code, world = fake_run([BROKEN, second] * 3, restarts=20)
    assert code == EXIT_FAILED and len(world.calls) == num_calls
    is_repeated = num_calls == 2
    assert (
        'two attempts in a row ended with the same failure (step 0, start-up); not restarted'
        in world.messages
    ) == is_repeated


def test_host_that_answers_again_is_named_and_counted_by_elastic():
    code, world = fake_run([dict(CUT, end='interrupted', code=75), CUT], restarts=5, elastic=True)
    assert code == EXIT_OK and world.hosts == [HOSTS, HOSTS, ('h1', 'h3')]
    cause = 'had no contact to the launcher for 20 s'
    assert [a['cause'] for a in world.attempts] == [f'host h2 {cause}'] * 2 + ['converged']
    assert (
        world.messages.count(f'host h2 (with rank 1) {cause}; last recorded: step 0, start-up') == 2
    )


@pytest.mark.parametrize(
    'fault, has_doctor',
    [
        (KILLED, False),
        (CUT, False),
        (BROKEN, True),
        (STUCK, True),
        (dict(CUT, silent={'h2'}), True),
    ],
)
def test_doctor_is_repeated_unless_all_hosts_passed_and_answer(fault, has_doctor):
    code, world = fake_run([FIT, fault, *([FIT] * has_doctor)], doctor=True, restarts=5)
    assert code == EXIT_OK
    assert world.commands == [
        'doctor',
        'train',
        *(['doctor'] * has_doctor),
        'train',
    ]


@pytest.mark.parametrize(
    'end, expected',
    [
        ('converged', EXIT_OK),
        ('aborted', EXIT_AT_ONCE),
        ('interrupted', EXIT_AT_ONCE),
        (None, EXIT_AT_ONCE),
    ],
)
def test_second_ctrl_c_keeps_the_result_of_a_finished_run(end, expected):
    assert fake_run([attempt(137, end, 1, has_stop=True, is_forced=True)])[0] == expected


def test_elastic_waits_for_a_host_that_soon_answers():
    code, world = fake_run([attempt(1, silent={'h2'})], restarts=1, elastic=True)
    assert code == EXIT_OK and world.calls[1][0] == HOSTS


def test_elastic_excludes_a_host_that_stays_silent(monkeypatch):
    monkeypatch.setattr(supervisor, 'ELASTIC_LIMIT_S', 0.0)
    code, world = fake_run([attempt(1, silent={'h2'})], restarts=1, elastic=True)
    assert code == EXIT_OK and world.calls[1][0] == ('h1', 'h3')


def test_resume_continues_the_set_of_seeds(tmp_path):
    world = Fake(tmp_path / 'run', [CONVERGES, attempt(75, 'interrupted', 1, has_stop=True)])
    assert world.supervisor(seeds=4).run_all() == EXIT_RESUMABLE
    world.is_requested = False
    assert world.supervisor(seeds=4, resume=True).run_all() == EXIT_OK
    assert ['--resume' in words for _, words in world.calls] == [False, False, True, False, False]
    assert len(list(world.folder.glob('result_*'))) == 4


@pytest.mark.parametrize('fault', [BROKEN, attempt(1, blames='h2')])
def test_elastic_excludes_host_that_fails_twice(fault):
    without = [HOSTS, HOSTS, ('h1', 'h3')]
    cause = fault.get('cause', 'killed')
    code, world = fake_run([fault] * 2, restarts=20, elastic=True)
    assert code == EXIT_OK and world.hosts == without
    text = 'excluding h2 after 2 failures in attempts without a newer checkpoint'
    assert any(m.startswith(text) and m.endswith(f'{cause})') for m in world.messages)
    assert set(fake_run([fault] * 2, restarts=5)[1].hosts) == {HOSTS}
    in_doctor = dict(fault, begins=False)
    _, world = fake_run([in_doctor] * 2 + [FIT], doctor=True, restarts=5, elastic=True)
    assert world.hosts == [*without, ('h1', 'h3')]


def test_stop_request_before_start_starts_nothing(tmp_path):
    world = Fake(tmp_path / 'run', [])
    world.is_requested = True
    assert world.supervisor(doctor=True).run_all() == EXIT_FAILED
    assert not world.calls and not world.folder.exists()
