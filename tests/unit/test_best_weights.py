"""The thread that writes networks and checkpoints."""

import os
import sys
import threading
from concurrent.futures import wait
from unittest.mock import Mock

import pytest
from helpers import ROOT, run
from tiny import tiny_config

from mlperf_rn50.errors import CheckpointError
from mlperf_rn50.model.weights import load_weights
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.plan import make_plan

# Reads the parameters of a small graph in the main and a writer thread, and prints how many threads
# were started.
COUNT_THREADS = """import os
import mxnet as mx
from mlperf_rn50.system.processor import leave_openmp_to_engine
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
leave_openmp_to_engine()
net = mx.gluon.nn.Conv2D(16, 3, in_channels=16, layout='NCHW')
net.initialize()
net.hybridize(static_alloc=True)
net(mx.nd.ones((4, 16, 32, 32))).wait_to_read()
read = lambda: [p.data().asnumpy() for p in net.collect_params().values()]
writer = BackgroundWriter()
writer.submit(os.getpid)
writer.finish()
before = len(os.listdir('/proc/self/task'))
read()
writer.submit(read)
writer.finish()
print(len(os.listdir('/proc/self/task')) - before)
"""


def test_reading_weights_starts_no_threads():
    environ = {**os.environ, 'OMP_NUM_THREADS': '2', 'PYTHONPATH': str(ROOT)}
    done = run([sys.executable, '-c', COUNT_THREADS], cwd=ROOT, env=environ)
    assert done.stdout.split() == ['0'], done.stderr


def test_write_does_not_block_training_and_a_second_write_waits():
    gate, written = threading.Event(), []

    def write(k):
        gate.wait()
        written.append(k)

    writer = BackgroundWriter()
    writer.submit(lambda: write(1))
    writer.check()
    assert written == [] and writer.is_busy
    threading.Timer(0.2, gate.set).start()
    writer.submit(lambda: write(2))
    assert written[0] == 1
    writer.finish()
    assert written == [1, 2] and not writer.is_busy


def test_best_network_is_the_best_that_is_kept_also_after_resumes(tmp_path):
    """A run that went back may have had a better accuracy, with a network that was put aside."""
    for counts, kept in (((700, 715, 710), 0.715), ((712,), 0.715), ((714, 720, 716), 0.720)):
        best = BestWeights(RunFolder(tmp_path, 0), make_plan(tiny_config(), 1), ['a', 'b', 'c'], '')
        for step, num_top1 in enumerate(counts):
            best.update(step, Accuracy(num_top1, 900, 1000), copy=dict)
        best.write_best()
        assert load_weights(tmp_path)[0].top1 == kept


def test_write_error_is_raised_once_by_the_next_call():
    writer = BackgroundWriter()
    fail = Mock(side_effect=CheckpointError('the disk is full'))
    for after in (writer.check, writer.finish, lambda: writer.submit(lambda: None)):
        wait([writer.submit(fail)])
        with pytest.raises(CheckpointError, match='the disk is full'):
            after()
        writer.check()
        writer.finish()
