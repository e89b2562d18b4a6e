"""Time per step that the step timer costs, always and while tracing, compared with a timer that does nothing.

Digits (2 ranks, real images) and ResNet-50 at 224 px (1 rank, batch 32, synthetic images), each with the same trainer
for all variants, in alternating rounds. The overheads are medians over rounds of the ratio to the variant before.
Usage: .venv/bin/python benchmarks/trace.py [--rounds 10] [--cases digits,resnet50]
"""
import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {'no timer': None, 'always on': 0.005, 'tracing': 0.02}  # with the largest overhead allowed
# Number of ranks and of steps in a round.
CASES = {'digits': (2, 12), 'resnet50': (1, 3)}


def config_of(case):
    """Return the configuration of a case."""
    from mlperf_rn50.cli.parsers import config_parser
    from mlperf_rn50.config import Config
    from mlperf_rn50.config_file import resolve_config
    from mlperf_rn50.data.options import DataConfig
    from mlperf_rn50.model.options import ModelConfig
    from mlperf_rn50.train.options import TrainConfig
    if case == 'digits':
        return resolve_config(ROOT / 'launch/configs/digits_cpu.yaml', [], config_parser())
    return Config(data=DataConfig(synthetic=True), model=ModelConfig(fused_bn_relu=True),
                  train=TrainConfig(local_batch_size=32))


def timers():
    """Return a function for each variant that returns its timer."""
    from mlperf_rn50.train.comm.step_timer import StepTimer
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat
    nothing = SimpleNamespace(is_sampling=False, mark=lambda array: array, mark_data=lambda *_: None,
                              mark_exchange=lambda *_: None, mark_update=lambda _: None,
                              check=lambda: None, drain=lambda: None)
    heartbeat = Heartbeat()

    def started(num_traced):
        timer = StepTimer(heartbeat.mark_exchange, heartbeat.record_step)
        timer.start()
        timer.start_trace(num_traced)
        return timer
    return dict(zip(VARIANTS, (lambda: nothing, lambda: started(0), lambda: started(10_000)), strict=True))


def measure(case, rounds):
    """Print on rank 0 the seconds per step of each variant and round."""
    import horovod.mxnet as hvd

    from mlperf_rn50.data.batches import train_batches
    from mlperf_rn50.system.processor import leave_openmp_to_engine
    from mlperf_rn50.train.comm.horovod import open_comm
    from mlperf_rn50.train.plan import make_plan
    from mlperf_rn50.train.trainer import Trainer
    leave_openmp_to_engine()
    config, comm = config_of(case), open_comm('none')
    # With one bucket, no exchange would overlap the backward pass.
    config = replace(config, comm=replace(config.comm, num_buckets=8))
    plan = make_plan(config, comm.world_size)
    trainer = Trainer(plan, comm, 0, None)
    trainer.broadcast()
    batches, numbers, makers = train_batches(config, plan.train_shard(comm.rank), 0, 0, None), count(), timers()

    def steps(number):
        """Return the seconds per step of steps that, as in training, do not wait for each other."""
        pending = []
        trainer.settle()
        comm.barrier()
        start = time.perf_counter()
        for step in (next(numbers) for _ in range(number)):
            pending.append(trainer.step(batches, step % plan.steps_per_epoch, plan.learning_rate(0)))
            if len(pending) > 2:
                trainer.read(pending.pop(0))
        trainer.settle()
        return (time.perf_counter() - start) / number
    steps(4)
    for number in range(rounds):
        order = list(VARIANTS)[::1 if number % 2 else -1]
        for variant in order:
            trainer.timer = makers[variant]()
            steps(1)  # not timed, because a new timer starts with it
            seconds = steps(CASES[case][1])
            if comm.rank == 0:
                print(f'round {number} {variant}: {seconds:.6f}', flush=True)
    if comm.world_size > 1:
        hvd.shutdown()


def compare(case, rounds):
    """Return rows of the table for a case, measured by processes of their own."""
    command = [ROOT / 'launch/ranks.sh', CASES[case][0], sys.executable, __file__, '--measure', case]
    done = subprocess.run([*map(str, command), '--rounds', str(rounds)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f'{case}: exit code {done.returncode}\n{done.stderr[-2000:]}')
    lines = [x.removeprefix('round ') for x in done.stdout.splitlines() if x.startswith('round ')]
    seconds = {v: {int(x.split()[0]): float(x.split()[-1]) for x in lines if f' {v}: ' in x} for v in VARIANTS}
    rows, before = [], None
    for variant, limit in VARIANTS.items():
        row = [case, variant, 1000 * statistics.median(seconds[variant].values())]
        if before:
            low, middle, high = statistics.quantiles(
                [seconds[variant][k] / seconds[before][k] - 1 for k in seconds[variant]], n=4, method='inclusive')
            row += [f'{middle:+.2%}', f'{low:+.2%} to {high:+.2%}', f'{limit:.1%}']
        rows.append(row)
        before = variant
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--cases', default=','.join(CASES))
    parser.add_argument('--measure', choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure, options.rounds)
    if not (ROOT / 'data/digits').exists():
        subprocess.run([sys.executable, '-m', 'mlperf_rn50', 'prepare', 'digits', '--out', 'data/digits'], check=True,
                       cwd=ROOT)
    rows = [row for case in options.cases.split(',') for row in compare(case, max(2, options.rounds))]
    print(tabulate(rows, ['case', 'timer', 'ms/step', 'overhead', 'middle half of the rounds', 'target'],
                   floatfmt='.2f'))


if __name__ == '__main__':
    main()
