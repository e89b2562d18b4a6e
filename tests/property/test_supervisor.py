"""Every sequence of ends: whatever attempts come to, a launcher ends, with a code that its run folder bears out."""
import json
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.launch.attempts import MAX_STUCK
from mlperf_rn50.launch.options import make_parser, parse_options
from mlperf_rn50.launch.supervisor import RunPlace, Supervisor, World
from mlperf_rn50.train.checkpoint.run_folder import RunFolder
from mlperf_rn50.train.watchdog.host_failures import Failure, note_failure

HOSTS = ('h1', 'h2', 'h3')
OPTIONS = parse_options(make_parser(ROOT / 'launch/mpirun.sh', True, None), ['--config', 'c.yaml', '--no-doctor'])

# One start of the ranks: steps gained, how the run says it ended, the exit code, whether the user asks meanwhile, and
# the hosts that are silent afterwards.
starts = st.builds(dict, begins=st.booleans(), steps=st.integers(0, 2),
                   end=st.sampled_from([None, None, None, 'converged', 'aborted', 'failed', 'interrupted']),
                   code=st.sampled_from([0, 1, 2, 75, 137]), asked=st.sampled_from([False, False, False, True]),
                   silent=st.sets(st.sampled_from(HOSTS), max_size=3))


def one(code, end=None, steps=0, begins=True, asked=False, silent=(), **keys):
    """One start of the ranks."""
    return dict(code=code, end=end, steps=steps, begins=begins, asked=asked, silent=set(silent), **keys)


CONVERGES, GAINS, STUCK = one(0, 'converged', 1), one(1, steps=1), one(1)
FIT, UNFIT = one(0, begins=False), one(1, begins=False)  # a doctor


class Fake:
    """A world in which the ranks do what a list says, and then converge; it writes the files that they would."""

    is_at_once = False

    def __init__(self, folder, script):
        self.folder, self.script, self.is_asked, self.silent = folder, list(script), False, set()
        self.said, self.paused, self.calls = [], 0.0, []

    def start(self, layout, job, words, has_begun):
        self.calls.append((layout.hosts, list(words)))
        todo = self.script.pop(0) if self.script else CONVERGES
        self.is_asked |= todo['asked']
        self.silent = todo['silent']
        if 'blames' in todo:
            self.folder.mkdir(exist_ok=True)
            note_failure(self.folder, Failure(job, todo['blames'], 'killed'))
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
            (run.checkpoints / f'step_{k:08d}').mkdir(parents=True)
        events = [*([{'event': 'resumed', 'step': step}] if '--resume' in words else []),
                  *({'event': 'train', 'step': k} for k in steps),
                  *([{'event': 'end', 'status': todo['end']}] if todo['end'] else [])]
        with open(run.metrics, 'a') as f:
            f.writelines(json.dumps(e) + '\n' for e in events)

    def pause(self, seconds):
        self.paused += seconds
        self.silent = set()  # hosts come back when they are waited for

    def supervisor(self, options):
        world = World(self.start, lambda hosts: [h for h in hosts if h in self.silent], self.said.append, self)
        return Supervisor(world, options, RunPlace(self.folder, HOSTS, 1), True, 'batch', 'token')


def end_of(todo, hosts):
    """How a start on hosts ended by its own account; one that nobody asked to stop was ended with a lost host."""
    has_lost = todo['code'] == EXIT_FAILED or bool(todo['silent'] & set(hosts))
    is_lost = todo['end'] == 'interrupted' and has_lost and not todo['asked']
    return todo['end'] if todo['begins'] and not is_lost else None


def fake_run(script, options):
    with tempfile.TemporaryDirectory() as name:
        world = Fake(Path(name) / 'run', script)
        code = world.supervisor(options).run_all()
        has_checkpoint = bool(list(world.folder.glob('checkpoints*/step_*')))
    return code, world, has_checkpoint


@given(st.lists(starts, max_size=8), st.integers(0, 8), st.booleans())
def test_a_launcher_ends_with_a_code_that_is_borne_out(script, restarts, is_elastic):
    code, world, has_checkpoint = fake_run(script, replace(OPTIONS, restarts=restarts, elastic=is_elastic))
    done = script[:len(world.calls)] + [CONVERGES] * (len(world.calls) - len(script))
    ends = [end_of(d, hosts) for d, (hosts, _) in zip(done, world.calls)]
    last = done[-1]
    assert 1 <= len(world.calls) <= 1 + restarts
    assert all(not d['asked'] for d in done[:-1])  # nothing more is started for who asked to stop
    assert all(end is None for end in ends[:-1])  # nor after an end of the run's own
    assert all(d['code'] != EXIT_USAGE for d in done[:-1])  # nor after a mistake
    end = ends[-1]
    if end:
        assert code == {'converged': EXIT_OK, 'interrupted': EXIT_RESUMABLE}.get(end, EXIT_FAILED)
    elif last['asked']:
        assert code in (EXIT_RESUMABLE, EXIT_FAILED)
    else:
        assert code in (EXIT_FAILED, EXIT_USAGE) and (code == EXIT_USAGE) == (last['code'] == EXIT_USAGE)
    assert code != EXIT_OK or end == 'converged'
    assert code != EXIT_RESUMABLE or has_checkpoint or end == 'interrupted'


@pytest.mark.parametrize('restarts', [0, 1, MAX_STUCK - 1, MAX_STUCK, 20])
def test_attempts_that_gain_nothing_are_few_and_those_that_gain_are_many(restarts):
    code, world, _ = fake_run([STUCK] * 30, replace(OPTIONS, restarts=restarts))
    assert code == EXIT_FAILED and len(world.calls) == min(1 + restarts, MAX_STUCK)
    assert restarts < MAX_STUCK or 'wrote no newer checkpoint' in world.said[-1]
    code, world, _ = fake_run([GAINS] * 9, replace(OPTIONS, restarts=20))
    assert code == EXIT_OK and len(world.calls) == 10 and world.paused == 0


def test_a_run_that_was_stopped_is_not_taken_for_stopped_again(tmp_path):
    world = Fake(tmp_path / 'run', [one(75, 'interrupted', 1, asked=True), one(137, begins=False)])
    assert world.supervisor(OPTIONS).run_all() == EXIT_RESUMABLE
    world.is_asked = False
    assert world.supervisor(replace(OPTIONS, resume=True)).run_all() == EXIT_FAILED  # and not 75


def test_a_run_that_a_lost_host_interrupted_is_started_again():
    again = replace(OPTIONS, restarts=1)
    lost = one(EXIT_FAILED, 'interrupted', 1, silent={'h2'})
    code, world, _ = fake_run([lost], again)
    assert code == EXIT_OK and len(world.calls) == 2
    assert any(said.startswith(f'host h2 (with rank 1) does not answer {platform.node()}; ') for said in world.said)
    assert fake_run([lost], OPTIONS)[0] == EXIT_FAILED
    assert fake_run([dict(lost, code=EXIT_RESUMABLE)], again)[0] == EXIT_OK
    assert fake_run([dict(lost, code=EXIT_RESUMABLE, silent=set())], again)[0] == EXIT_RESUMABLE


def test_what_has_begun_is_told_by_its_run_folder(tmp_path):
    seen = []

    class Asking(Fake):
        def start(self, layout, job, words, has_begun):
            before = has_begun()
            code = super().start(layout, job, words, has_begun)
            seen.append((words[0], before, has_begun()))
            return code
    world = Asking(tmp_path / 'run', [FIT])
    assert world.supervisor(replace(OPTIONS, doctor=True)).run_all() == EXIT_OK
    assert seen == [('doctor', False, False), ('train', False, True)]


@pytest.mark.parametrize('lost', [dict(code=137), dict(code=205, silent={'h2'}), dict(code=EXIT_FAILED, silent={'h2'}),
                                  dict(code=EXIT_FAILED, blames='h2')])
def test_a_first_doctor_that_loses_a_rank_is_an_attempt(lost):
    lost = one(begins=False, **lost)
    code, world, _ = fake_run([lost, FIT], replace(OPTIONS, doctor=True, restarts=3))
    assert code == EXIT_OK and [words[0] for _, words in world.calls] == ['doctor', 'doctor', 'train']
    code, world, _ = fake_run([lost], replace(OPTIONS, doctor=True))
    assert code == EXIT_FAILED and len(world.calls) == 1
    assert any('host h2 (with rank 1)' in said for said in world.said) == bool(lost['silent'])


def test_a_doctor_that_fails_on_a_restart_is_an_attempt_that_gained_nothing():
    options = replace(OPTIONS, doctor=True, restarts=3)
    code, world, _ = fake_run([FIT, GAINS, UNFIT, FIT], options)
    assert code == EXIT_OK
    assert [words[0] for _, words in world.calls] == ['doctor', 'train', 'doctor', 'doctor', 'train']
    code, world, _ = fake_run([UNFIT], options)
    assert code == EXIT_FAILED and len(world.calls) == 1  # what is unfit from the beginning is reported at once


def test_resume_goes_on_with_the_set_of_seeds(tmp_path):
    world = Fake(tmp_path / 'run', [CONVERGES, one(75, 'interrupted', 1, asked=True)])
    assert world.supervisor(replace(OPTIONS, seeds=4)).run_all() == EXIT_RESUMABLE
    world.is_asked = False
    assert world.supervisor(replace(OPTIONS, seeds=4, resume=True)).run_all() == EXIT_OK
    assert ['--resume' in words for _, words in world.calls] == [False, False, True, False, False]
    assert len(list(world.folder.glob('result_*'))) == 4


def test_elastic_leaves_out_a_host_that_fails_twice():
    fails = one(1, blames='h2')
    _, world, _ = fake_run([fails, fails], replace(OPTIONS, restarts=5, elastic=True))
    assert [hosts for hosts, _ in world.calls] == [HOSTS, HOSTS, ('h1', 'h3')]
    assert 'excluding h2, which failed twice without gaining steps (killed)' in world.said
    _, world, _ = fake_run([fails, fails], replace(OPTIONS, restarts=5))
    assert {hosts for hosts, _ in world.calls} == {HOSTS}


def test_who_asks_before_anything_started_starts_nothing(tmp_path):
    world = Fake(tmp_path / 'run', [])
    world.is_asked = True
    assert world.supervisor(replace(OPTIONS, doctor=True)).run_all() == EXIT_FAILED
    assert not world.calls and not world.folder.exists()
