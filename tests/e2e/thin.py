"""Program mlperf-rn50 as a separate process with the thin networks of the fixture `thin`.

With --stuck=N, rank 1 gets N batches and then waits indefinitely. With --die=N, each rank gets N
batches and is killed.
"""

import os
import signal
import sys
import time
from itertools import islice

from mlperf_rn50.cli import main, ranks
from mlperf_rn50.system.launcher_env import launched_rank
from mlperf_rn50.train.watchdog import watcher

CHANNELS = (16, 32, 64, 128)
STUCK, DIE = (
    next((int(w.partition('=')[2]) for w in sys.argv if w.startswith(o)), 0)
    for o in ('--stuck=', '--die=')
)


def stuck(batches):
    yield from islice(batches, STUCK)
    time.sleep(100000)


def dying(batches):
    yield from islice(batches, DIE)
    os.kill(os.getpid(), signal.SIGKILL)


def in_rank(program, *args, real=ranks.in_rank, **keys):
    def thin_program(heartbeat):  # runs after the watcher forks; heavy imports must follow the fork
        from mlperf_rn50.model import resnet
        from mlperf_rn50.train import build

        resnet.STAGE_CHANNELS, train_batches = CHANNELS, build.train_batches
        if STUCK and launched_rank():
            build.train_batches = lambda *a: stuck(train_batches(*a))
        if DIE:
            build.train_batches = lambda *a: dying(train_batches(*a))
        return program(heartbeat)

    return real(thin_program, *args, **keys)


if __name__ == '__main__':
    ranks.in_rank = in_rank
    if STUCK:
        watcher.REPORTS_S += 600 * launched_rank()  # rank 0 must report first
    sys.exit(main([word for word in sys.argv[1:] if not word.startswith(('--stuck=', '--die='))]))
