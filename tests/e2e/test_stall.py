"""A run that stands still: it ends and says who waits for whom."""
import sys

from e2e.training import arguments
from helpers import run, under_ranks

# Rank 1's eighth batch never comes.
PROGRAM = '''
import itertools, sys, time
from mlperf_rn50.cli import main, train as command
from mlperf_rn50.system.launched import launched_rank
from mlperf_rn50.train import watch
watch._HEAR_OTHERS_S += 600 * launched_rank()  # rank 0 speaks first, however far rank 1 is ahead of it
def stuck(batches):
    yield from itertools.islice(batches, 7)
    time.sleep(100000)
def run(*words, real=command._train):
    from mlperf_rn50.train import start
    made = start.train_batches
    start.train_batches = lambda *a: stuck(made(*a)) if launched_rank() else made(*a)
    return real(*words)
command._train = run
sys.exit(main(sys.argv[1:]))
'''


def test_a_rank_whose_data_does_not_come_is_named_by_the_one_that_waits(tiny, tmp_path):
    options = ['--comm.stall_limit_s=20', '--checkpoint.period_epochs=0']
    words = [sys.executable, '-c', PROGRAM, *arguments(tmp_path, tiny, *options)]
    done = run(under_ranks(2, words))
    assert done.returncode == 1
    [folder] = (tmp_path / 'stalled').iterdir()
    assert 'step 7, training: no progress for ' in done.stderr
    assert ' s (comm.stall_limit_s): waiting in the exchange of step 8 for rank 1 on ' in done.stderr
    assert '(busy: reading data); its stacks: ' in done.stderr
    assert f'its stacks: {folder}/rank_0.txt' in done.stderr
    assert 'asnumpy' in (folder / 'rank_0.txt').read_text() and 'stuck' in (folder / 'rank_1.txt').read_text()
