"""What is written in the background: in order, and its errors are told."""
import threading
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from mlperf_rn50.errors import CheckpointError, StorageError
from mlperf_rn50.train import loop
from mlperf_rn50.train.saver import Saver


def test_training_goes_on_meanwhile_and_a_second_one_waits():
    gate, written, waits = threading.Event(), [], []

    def open_gate():  # said while the second one waits
        waits.append(1)
        gate.set()
    saver = Saver(open_gate)

    def write(k):
        gate.wait()
        written.append(k)
    saver.submit(lambda: write(1))
    saver.check()
    assert written == []
    saver.submit(lambda: write(2))
    assert written[0] == 1 and waits
    saver.finish()
    assert written == [1, 2]


def fail():
    raise CheckpointError('the disk is full')


def test_an_error_is_told_once_at_the_next_step_at_the_end_or_by_the_next_one():
    saver = Saver()
    for after in (saver.check, saver.finish, lambda: saver.submit(lambda: None)):
        saver.submit(fail)
        wait([saver._pending])
        with pytest.raises(CheckpointError, match='the disk is full'):
            after()
        saver.check()
        saver.finish()


def test_a_checkpoint_that_filled_the_disk_is_named_before_what_had_no_room_beside_it(monkeypatch):
    def write_log(_):
        raise StorageError('result_0.txt')
    monkeypatch.setattr(loop, 'run_epochs', write_log)
    saver = Saver()
    with pytest.raises(StorageError, match='result_0.txt'):
        loop.train_to_target(SimpleNamespace(saver=saver))
    saver.submit(fail)
    with pytest.raises(CheckpointError, match='the disk is full'):
        loop.train_to_target(SimpleNamespace(saver=saver))
