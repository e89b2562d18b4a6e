"""Faults that a user requests with --drill."""

import os
import signal
from threading import Thread

import pytest
from helpers import call
from tiny import tiny_config

from mlperf_rn50.errors import EXIT_USAGE, ConfigError, StorageError
from mlperf_rn50.parser import Drill, parse_drill
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.run import RunArguments, train
from mlperf_rn50.train.sinks.drilled import Drilled
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


@pytest.mark.parametrize('kind', ['kill', 'stop', 'hang', 'link', 'full-disk'])
def test_drill_is_read_as_it_is_written(kind):
    text = f'{kind}:rank3@step200'
    assert parse_drill(text) == Drill(kind, rank=3, step=200) and str(parse_drill(text)) == text


@pytest.mark.parametrize('text', ['kill', 'burn:rank0@step1', 'kill:rank0@step0', 'kill:rank-1@1'])
def test_other_texts_are_refused_with_the_form(text):
    done = call('train', '--drill', text, '--train.global_batch_size', 8, '--print', 'run.dir')
    assert done.returncode == 2 and 'KIND:rank<R>@step<S>' in done.stderr


def after_step(step, kind, path):
    """Handle the end of a step in a rank whose fault comes after step 3."""
    done = events.StepDone(None, step=step, loss=1.0, learning_rate=0.1, images_per_s=1.0)
    Drilled(Drill(kind, rank=0, step=3), path).handle(done)


def test_full_disk_is_the_error_of_a_full_disk_after_its_step_only(tmp_path):
    for step in (2, 4):
        after_step(step, 'full-disk', tmp_path)
    with pytest.raises(StorageError, match='metrics.jsonl: cannot write: No space left') as e:
        after_step(3, 'full-disk', tmp_path / 'metrics.jsonl')
    assert e.value.exit_code == EXIT_USAGE  # after which a launcher does not restart


@pytest.mark.parametrize('kind, number', [('kill', signal.SIGKILL), ('stop', signal.SIGSTOP)])
def test_signal_is_sent_to_this_process(monkeypatch, tmp_path, kind, number):
    sent = []
    monkeypatch.setattr(os, 'kill', lambda *arguments: sent.append(arguments))
    after_step(3, kind, tmp_path)
    assert sent == [(os.getpid(), number)]


def test_hanging_rank_never_returns(tmp_path):
    thread = Thread(target=after_step, args=(3, 'hang', tmp_path), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()


def test_lost_link_needs_a_connection_of_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv('MLPERF_RN50_JOB', '1-of-no-process')
    with pytest.raises(ConfigError, match='link:rank0@step3, but this rank sees no sshd'):
        after_step(3, 'link', tmp_path)


def test_rank_that_does_not_exist_is_refused():
    arguments = RunArguments(tiny_config(), Comm(), Heartbeat(), drill=Drill('kill', 1, 5))
    with pytest.raises(ConfigError, match='got rank 1, expected one below 1'):
        train(arguments)
