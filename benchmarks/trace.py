"""Time per step that the step timer costs, always and while tracing, compared with a timer that
does nothing.

Digits (32 images per rank, from files) and ResNet-50 at 224 px (16 images per rank, synthetic),
each with 2 ranks and 8 buckets. All measurements of a case use one trainer for all variants.

Overhead: median over rounds of the ratio of wall times to those without timer, with the 95 %
bootstrap interval. A round has two short blocks of steps per variant, in random order and then in
its reverse, which removes linear drift. Direct: CPU time of the timer's own work, in percent of a
step as if all of it delayed the step. It is measured on the main thread (around each call, in the
rounds), on the timer's thread (in the rounds), and on the threads of MXNet's engine (the operations
that the timer pushes, alone, after the caches were filled with other data). The report at an
evaluation is not part of these.

Usage: .venv/bin/python benchmarks/trace.py [--seconds 600] [--cases digits,resnet50]
The case digits requires data/digits: mlperf-rn50 prepare digits --out data/digits
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
# with the largest overhead allowed
VARIANTS = {'no timer': None, 'always on': 0.005, 'tracing': 0.02}
CASES = {'digits': 2, 'resnet50': 1}  # with the number of steps in a block
NUM_RANKS, NUM_BUCKETS = 2, 8
SAMPLING_STEPS = 16  # the timer marks the buckets of one in so many steps
NUM_ALONE = 8  # repetitions of the timer's operations alone


def config_of(case):
    """Return the configuration of a case."""
    from mlperf_rn50.cli.parsers import config_parser
    from mlperf_rn50.config import Config
    from mlperf_rn50.config_file import resolve_config
    from mlperf_rn50.data.options import DataConfig
    from mlperf_rn50.train.options import TrainConfig

    if case == 'digits':
        config = resolve_config(ROOT / 'launch/configs/digits_cpu.yaml', [], config_parser())
    else:
        config = Config(data=DataConfig(synthetic=True), train=TrainConfig(local_batch_size=16))
    return replace(config, comm=replace(config.comm, num_buckets=NUM_BUCKETS))


def make_timers():
    """Return the timer of each variant; the one that traces keeps the times of all steps."""
    from mlperf_rn50.train.comm.step_timer import StepTimer
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

    heartbeat = Heartbeat()
    timers = [StepTimer(heartbeat.mark_exchange, heartbeat.record_step) for _ in range(2)]
    timers[1].start_trace(10**9)
    names = ('mark_data', 'mark_exchange', 'mark_update', 'check', 'drain', 'start')
    nothing = SimpleNamespace(
        is_sampling=False,
        mark=lambda array: array,
        take_trace=lambda is_end: [],
        **dict.fromkeys(names, lambda *_: None),
    )
    return dict(zip(VARIANTS, (nothing, *timers), strict=True))


class Timed:
    """Timer whose calls on the main thread are timed."""

    def __init__(self, timer):
        self.timer, self.cpu_s = timer, 0.0

    def _timed(self, function, *arguments):
        start = time.thread_time()
        result = function(*arguments)
        self.cpu_s += time.thread_time() - start
        return result

    def __getattr__(self, name):
        value = self._timed(getattr, self.timer, name)
        return (lambda *arguments: self._timed(value, *arguments)) if callable(value) else value


class Measurement:
    """A trainer whose steps are measured with each timer."""

    def __init__(self, case):
        import mxnet as mx

        from mlperf_rn50.data.batches import train_batches
        from mlperf_rn50.runfolder.names import RunFolder
        from mlperf_rn50.system.processor import leave_openmp_to_engine
        from mlperf_rn50.train.comm.horovod import open_comm
        from mlperf_rn50.train.comm.rank_times import RankTimes
        from mlperf_rn50.train.plan import make_plan
        from mlperf_rn50.train.trainer import Trainer
        from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

        leave_openmp_to_engine()
        self.wait = mx.nd.waitall
        config, self.comm, self.num_steps = config_of(case), open_comm('none'), CASES[case]
        self.plan = make_plan(config, self.comm.world_size)
        self.trainer = Trainer(self.plan, self.comm, 0, None)
        self.trainer.broadcast()
        self.batches = train_batches(config, self.plan.train_shard(self.comm.rank), 0, 0, None)
        self.numbers, self.timers = count(), make_timers()
        own, heartbeat = {'rank': self.comm.rank, 'host': 'host', 'cores': '0'}, Heartbeat()
        self.folder = tempfile.TemporaryDirectory()
        self.times = {
            v: RankTimes(self.comm, t, own, RunFolder(Path(self.folder.name), 0), heartbeat)
            for v, t in self.timers.items()
        }

    def run(self, variant, number):
        """Take steps as the training loop does; return wall time, and CPU time of the main and the
        timer's thread."""
        trainer, times, pending = self.trainer, self.times[variant], []
        timer = Timed(self.timers[variant])
        trainer.settle()
        trainer.timer = times._timer = timer
        timer.start(next(self.numbers))
        thread_s, timer.cpu_s = thread_cpu_s(timer.timer), 0.0
        self.comm.barrier()
        start = time.perf_counter()
        for step in (next(self.numbers) for _ in range(number)):
            number_in_epoch = step % self.plan.steps_per_epoch
            pending.append(trainer.step(self.batches, number_in_epoch, self.plan.learning_rate(0)))
            for _ in range(len(pending) - 2):
                trainer.read(pending.pop(0))
            times.take_trace()
        for step in pending:
            trainer.read(step)
        self.wait()
        wall_s, main_s = time.perf_counter() - start, timer.cpu_s
        trainer.settle()
        return np.array([wall_s, main_s, thread_cpu_s(timer.timer) - thread_s])

    def round(self, choose):
        """Return the seconds per step of each variant: wall time, and CPU time of the main and the
        timer's thread."""
        order = choose.sample(list(VARIANTS), len(VARIANTS))
        sums = dict.fromkeys(VARIANTS, 0)
        for variant in order + order[::-1]:
            sums[variant] += self.run(variant, self.num_steps) / (2 * self.num_steps)
        return {v: dict(zip(('wall', 'main', 'thread'), seconds)) for v, seconds in sums.items()}

    def engine(self):
        """Return the CPU seconds per step of the operations that each variant's timer pushes to the
        engine."""
        alone = [
            {v: self.engine_cpu_s(t) for v, t in self.timers.items()} for _ in range(NUM_ALONE)
        ]
        means = {v: statistics.mean(a[v] for a in alone) for v in VARIANTS}
        return {v: means[v] - means['no timer'] for v in VARIANTS}

    def engine_cpu_s(self, timer):
        """Return the CPU seconds per step of other threads than main and timer's, for only the
        timer's operations."""
        buckets, last = self.trainer.optimizer.buckets, self.trainer.optimizer.tensors[-1].grad
        other, cpu_s = np.empty(2**22), 0.0
        timer.start(next(self.numbers))
        for number in range(SAMPLING_STEPS):
            other.fill(number)  # the caches then hold other data, as after a forward pass
            before = time.process_time() - time.thread_time() - thread_cpu_s(timer)
            timer.mark_data(time.monotonic())
            computed, sampled = timer.mark(last), buckets if timer.is_sampling else []
            ready, done = ([timer.stamp(b.last) for b in sampled] for _ in range(2))
            timer.mark_exchange(computed, timer.mark(last), ready or None, done)
            timer.mark_update(timer.mark(buckets[-1].tensors[-1].weight))
            self.trainer.timer = timer
            self.trainer.settle()
            cpu_s += time.process_time() - time.thread_time() - thread_cpu_s(timer) - before
        return cpu_s / SAMPLING_STEPS


def thread_cpu_s(timer):
    """Return the CPU seconds of a timer's thread."""
    thread = getattr(timer, 'thread', None)
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread else 0.0


def measure(case, seconds):
    """Print rounds on rank 0, as JSON lines, until a time has passed."""
    import horovod.mxnet as hvd

    measurement = Measurement(case)
    choose = random.Random(measurement.comm.from_rank_0(time.time_ns))  # the same on all ranks
    for variant in VARIANTS:
        measurement.run(variant, 2)
    found = {'engine': measurement.engine()}
    end, rank = time.monotonic() + seconds, measurement.comm.rank
    while True:
        if rank == 0:
            print('line', json.dumps(found), flush=True)
        if measurement.comm.from_rank_0(lambda: time.monotonic() > end):
            break
        found = measurement.round(choose)
    measurement.trainer.settle()
    hvd.shutdown()


def collect(case, seconds):
    """Return the lines that the ranks of a case print."""
    command = [ROOT / 'launch/ranks.sh', NUM_RANKS, sys.executable, __file__, '--measure', case]
    command += ['--seconds', seconds]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f'{case}: exit code {done.returncode}\n{done.stderr[-2000:]}')
    return [json.loads(line) for line in re.findall('(?m)^line (.*)', done.stdout)]


def interval(values):
    """Return the median of values with its 95 % bootstrap interval."""
    medians = [np.median(np.random.default_rng(k).choice(values, len(values))) for k in range(2000)]
    middle, low, high = (
        f'{x:+.2%}' for x in (np.median(values), *np.percentile(medians, [2.5, 97.5]))
    )
    return f'{middle} ({low} to {high})'


def make_rows(case, lines):
    """Return the rows of the table for a case."""
    first = next(iter(VARIANTS))
    rounds = lines[1:]
    rows = []
    for variant, limit in VARIANTS.items():
        step_s = statistics.median(r[variant]['wall'] for r in rounds)
        row = [case, variant, len(rounds), f'{1000 * step_s:.1f}']
        if limit:
            parts = [
                statistics.mean(r[variant][key] - r[first][key] for r in rounds)
                for key in ('main', 'thread')
            ]
            parts.append(lines[0]['engine'][variant])
            row += [
                interval([r[variant]['wall'] / r[first]['wall'] - 1 for r in rounds]),
                ' + '.join(f'{1e6 * p:.0f}' for p in parts),
                f'{sum(parts) / step_s:.3%}',
                f'{limit:.1%}',
            ]
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--seconds', type=float, default=600)
    parser.add_argument('--cases', default=','.join(CASES))
    parser.add_argument('--measure', choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure, options.seconds)
    rows = []
    for case in options.cases.split(','):
        rows += make_rows(case, collect(case, options.seconds))
    direct = 'direct, us: main + thread + engine'
    head = ['case', 'timer', 'rounds', 'ms/step', 'overhead (95 %)', direct, 'direct', 'target']
    print(tabulate(rows, head, disable_numparse=True))


if __name__ == '__main__':
    main()
