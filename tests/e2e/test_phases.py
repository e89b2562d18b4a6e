"""Faults injected into the training process in each phase of a run."""

import json
import time

import pytest
from e2e.training import arguments, assert_aborted, assert_one_line, metrics
from helpers import call, wait_for

from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train import run
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.checkpoint.checkpoint import load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('thin')]
PHASES = {
    'start-up': lambda e: isinstance(e, events.Opened),
    'training': lambda e: isinstance(e, events.StepDone) and e.step == 7,
    'evaluation': lambda e: isinstance(e, events.EvalStarted) and e.epoch == 1,
    'checkpoint': lambda e: isinstance(e, events.Saving),
}


class FaultInjector:
    """Event sink that injects one fault in each given phase."""

    def __init__(self, phases, inject):
        self.phases, self.inject = list(phases), inject

    def handle(self, event):
        for phase in [p for p in self.phases if PHASES[p](event)]:
            self.phases.remove(phase)
            self.inject()

    def close(self):
        assert not self.phases, 'a phase was not reached'


@pytest.fixture
def train(tiny, tmp_path, monkeypatch):
    """Function that runs a training with a fault in some phases; returns the result and the run
    folder."""

    def run_with(phases, inject):
        run_dir, real = tmp_path / 'run', run.open_sinks
        injector = FaultInjector(phases, lambda: inject(run_dir))
        monkeypatch.setattr(run, 'open_sinks', lambda *args: [*real(*args), injector])
        options = '--train.max_epochs=2', '--checkpoint.period_steps=3'
        return call(*arguments(run_dir, tiny, *options)), run_dir

    return run_with


@pytest.mark.parametrize('phase', ['start-up', 'training', 'checkpoint'])
def test_vanished_run_folder_is_reported(train, phase):
    """A lost mount leaves an empty folder; the run must not write to it."""

    def lose(run_dir):
        if phase == 'training':  # the last checkpoint is complete before the folder vanishes
            written = (run_dir / 'checkpoints/step_00000006').exists
            wait_for(written, lambda: True, lambda: 'no checkpoint')
        run_dir.rename(run_dir.with_name('elsewhere'))
        run_dir.mkdir()

    done, run_dir = train([phase], lose)
    assert_one_line(done, 1, str(run_dir), 'has vanished')
    assert not list(run_dir.iterdir())
    for path in list_checkpoints(run_dir.with_name('elsewhere') / 'checkpoints'):
        load(path)


def test_times_survive_wall_clock_jumps(train, monkeypatch):
    real, jumped_s = time.time, [0.0]
    monkeypatch.setattr(time, 'time', lambda: real() + jumped_s[0])

    def jump(_):
        jumped_s[0] += 3600 if jumped_s[0] <= 0 else -7200

    start = time.monotonic()
    done, run_dir = train(PHASES, jump)
    took_s = time.monotonic() - start
    assert_aborted(done)
    lines = (run_dir / 'metrics.jsonl').read_text().splitlines()
    times = [json.loads(line)['time_s'] for line in lines if '"time_s"' in line]
    assert times == sorted(times) and 0 <= times[0] and times[-1] < took_s
    assert [m['status'] for m in metrics(run_dir, 'end')] == ['aborted']
