"""Reading a log is bounded in memory, whatever the log holds; what it reads stands in test_log_corpus.py."""
import tracemalloc

import pytest
from lines import mllog, write_lines

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.reader import read_events, read_run


def test_memory_does_not_grow_with_the_log(tmp_path):
    path = tmp_path / 'result_0.txt'
    with open(path, 'w') as f:
        f.write('x' * 9_000_000 + '\n')
        for epoch in range(10_100):
            f.write(mllog('eval_accuracy', epoch, 0.5, epoch_num=epoch) + '\n')
            f.write(mllog(f'opt_{epoch}', 0, 'x' * 400) + '\n')
        f.write(':::MLLOG ' + '[' * 2_000_000)
    tracemalloc.start()
    run = read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.evaluations) == 10_000 and len(run.warnings) < 200 and len(run.optimizer) == 64
    assert peak < 12_000_000


def test_lines_keep_their_numbers_after_a_long_one(tmp_path):
    path = write_lines(tmp_path / 'log', ['a' * 3_000_000, 'b', mllog('run_start', 0)])
    assert [number for number, _ in read_events(path)] == [3]


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(UserError, match='result_9.txt: cannot read the log'):
        read_run(tmp_path / 'result_9.txt')
