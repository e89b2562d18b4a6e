"""mlperf-rn50 as ranks that are processes of their own, with what the fixture `thin` gives those of a test's process.

With --stuck, rank 1's eighth batch never comes.
"""
import itertools
import sys
import time

from mlperf_rn50.cli import _ranks, main
from mlperf_rn50.system.launched import launched_rank
from mlperf_rn50.train import watch

THIN_CHANNELS = (16, 32, 64, 128)


def stuck(batches):
    yield from itertools.islice(batches, 7)
    time.sleep(100000)


def hold_up_rank_1():
    from mlperf_rn50.train import start
    made = start.train_batches
    start.train_batches = lambda *a: stuck(made(*a)) if launched_rank() else made(*a)


def run_thin(*arguments):
    is_stuck = '--stuck' in arguments
    real = _ranks.in_rank

    def in_rank(program, *args, **keys):
        def thin_program(position):  # after the fork of the watcher, before which nothing heavy may be imported
            from mlperf_rn50.model import resnet
            resnet.STAGE_CHANNELS = THIN_CHANNELS
            if is_stuck:
                hold_up_rank_1()
            return program(position)
        return real(thin_program, *args, **keys)
    _ranks.in_rank = in_rank
    if is_stuck:
        watch._HEAR_OTHERS_S += 600 * launched_rank()  # rank 0 speaks first, however far rank 1 is ahead of it
    return main([a for a in arguments if a != '--stuck'])


if __name__ == '__main__':
    sys.exit(run_thin(*sys.argv[1:]))
