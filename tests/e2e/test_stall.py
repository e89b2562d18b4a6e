"""A run that stands still: it ends and says who waits for whom."""
import signal
import sys

from e2e.training import STEPS_PER_EPOCH, arguments, command, start, wait_for_step
from helpers import CLI, HANG_LIMIT_S, run, under_ranks

from mlperf_rn50.train.checkpoint import list_checkpoints, load

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


def test_ctrl_c_in_a_run_without_a_launcher_leaves_a_checkpoint_to_go_on_from(tiny, tmp_path):
    process = start(command(tmp_path, tiny, '--checkpoint.period_epochs=0', '--train.max_epochs=1000'))
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 75 and 'Traceback' not in err, err
    assert f'mlperf-rn50 train --resume {tmp_path}' in out
    [path] = list_checkpoints(tmp_path / 'checkpoints')
    step = load(path)[0].step
    assert step > 3
    process = start([*CLI, 'train', '--resume', tmp_path, f'--train.max_epochs={step // STEPS_PER_EPOCH + 1}'])
    assert process.wait(HANG_LIMIT_S) == 1  # the target is out of reach
