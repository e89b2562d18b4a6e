"""Compare mlperf-rn50 with PyTorch in alternating runs, on 2 threads or a GPU; print medians and
ratios. Also has shared helpers.

Both programs have the same network and batch; in `target` also the same schedule, augmentation and
momentum rule. `step` trains with momentum on synthetic images. In `target`, both
evaluate after every epoch. The time of PyTorch excludes loading the arrays, creating the
network, and compiling it in a trial step and evaluation. The time of mlperf-rn50 is from run_start
to run_stop.

Usage: .venv/bin/python benchmarks/compare.py WHAT [CONFIG] [OPTIONS]
    step              images/s and the share of the fastest matrix product: ResNet-50, 224x224
    target CONFIG     complete runs: epochs, Top-1, seconds
CONFIG: launch/configs/cifar10_cpu.yaml (takes hours) or launch/configs/digits_cpu.yaml. OPTIONS:
see --help
"""

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}  # the launchers also set this
BOUND = {**HUGE_PAGES, 'OMP_PROC_BIND': 'close'}
NAME = 'mlperf-rn50'
# Of each torch variant: whether it is compiled, and its environment. BOUND is the fastest setting
# without additional libraries.
SIDES: dict[str, tuple[bool, dict[str, str]]] = {
    'torch eager': (False, {}),
    'torch compiled': (True, {}),
    'torch eager, huge pages, bound': (False, BOUND),
    'torch compiled, huge pages, bound': (True, BOUND),
}


def run_json(command: Sequence[object], **variables: str) -> dict:
    """Run a program on 2 threads; return the JSON object that it prints."""
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '2', **variables},
    )
    if done.returncode:
        sys.exit(
            f'{" ".join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-2000:]}'
        )
    return json.loads(done.stdout[done.stdout.index('{') :])


def bench(*arguments: object) -> dict:
    """Return the first row of the first table of `mlperf-rn50 bench`."""
    program = [ROOT / 'launch/bind.sh', sys.executable, '-m', 'mlperf_rn50', 'bench']
    done = run_json([*program, *arguments, '--format=json'], **HUGE_PAGES)
    return done['tables'][0]['rows'][0]


def torch_sides(run: Callable[..., dict], **options: object) -> dict[str, Callable[..., dict]]:
    """Return, for each torch variant, a function that calls run with the options and variables of
    this variant."""
    return {
        name: partial(run, variables, compile=is_compiled, **options)
        for name, (is_compiled, variables) in SIDES.items()
    }


def peer(variables: dict[str, str], python: Path, **options: object) -> dict:
    """Run torch_peer.py with these options; return its output."""
    return run_json([python, 'benchmarks/torch_peer.py', json.dumps(options)], **variables)


def local_command(config: object, run_dir: object, *options: object) -> list[str]:
    """Return the command that trains with one rank on all cores."""
    start = 'launch/local.sh --ranks-per-node 1 --config'.split()
    return [*start, *map(str, (config, '--run-dir', run_dir, *options))]


def top1_of_epochs(lines: Sequence[dict]) -> list[float]:
    return [m['num_top1'] / m['num_images'] for m in lines if m['event'] == 'eval']


def ended_runs(folder: Path) -> list[list[dict]]:
    """Return the records of metrics.jsonl of each complete run in a folder."""
    texts = [path.read_text() for path in sorted(folder.glob('metrics*.jsonl'))]
    runs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return [lines for lines in runs if lines and lines[-1]['event'] == 'end']


def train_program(config: Path, precision: str, seed: int) -> dict:
    """Train with mlperf-rn50; return time, epochs and the Top-1 of every epoch."""
    with tempfile.TemporaryDirectory() as folder:
        keys = f'--run.seed={seed}', f'--train.precision={precision}'
        command = local_command(config, folder, *keys)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        runs = ended_runs(Path(folder))
    if not runs:
        sys.exit(done.stderr)
    end, top1 = runs[0][-1], top1_of_epochs(runs[0])
    return {
        'time_to_train_s': end.get('time_to_train_s', math.inf),  # it failed
        'epochs': len(top1),
        'top1': top1,
        'is_converged': end['status'] == 'converged',
    }


def dump_arrays(folder: Path, out: Path) -> None:
    """Write the decoded images and the labels of a prepared folder to
    {train,validation}_{images,labels}.npy."""
    import numpy as np
    from PIL import Image

    from mlperf_rn50.data.recordio import RecordFile

    out.mkdir(parents=True, exist_ok=True)
    for split in ('train', 'validation'):
        records = RecordFile(folder / f'{split}.rec')
        read = [records.read(i) for i in range(len(records))]
        images = [
            np.asarray(Image.open(io.BytesIO(r.image.tobytes())).convert('RGB')) for r in read
        ]
        np.save(out / f'{split}_images.npy', np.stack(images))
        np.save(out / f'{split}_labels.npy', np.array([r.label for r in read]))


def train_torch(variables: dict[str, str], config: Path, **options: object) -> dict:
    """Train a configuration with torch."""
    from mlperf_rn50.cli.parsers import config_parser
    from mlperf_rn50.config import to_tree
    from mlperf_rn50.config_file import resolve_config

    recipe = to_tree(resolve_config(config, [], config_parser()))
    data = ROOT / recipe['data']['dir']
    arrays = data.with_name(f'{data.name}_arrays')
    labels = arrays / 'validation_labels.npy'
    if not labels.exists() or labels.stat().st_mtime < (data / 'manifest.json').stat().st_mtime:
        dump_arrays(data, arrays)
    return peer(variables, what='train', recipe=recipe, folder=str(arrays), **options)


def compare(title: str, sides: dict[str, Callable[[], dict]], rounds: int) -> None:
    """Measure all sides in turn, `rounds` times; print medians, shares of MXNet's fastest matrix
    product, and the ratio of mlperf-rn50, the first side, to the fastest other. Another that
    fails is left out."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in list(rates):
            try:
                row = sides[name]()
            except SystemExit as e:
                if name == NAME or len(rates) == 2:
                    raise
                del rates[name]
                print(f'{name}: left out: {e}', file=sys.stderr)
                continue
            rates[name].append(row['images_per_s'])
            if name == NAME:
                share_per_image = row['share_of_peak'] / row['images_per_s']
    medians = {name: statistics.median(values) for name, values in rates.items()}
    first, *others = medians.values()
    for name, median in medians.items():
        print(
            f'{name:34s} median {median:10.2f}  of {" ".join(f"{v:.2f}" for v in rates[name])}  '
            f'{first / median:.3f}  {median * share_per_image:.1%} of peak'
        )
    print(f'training step, {title}, images/s: ratio {first / max(others):.3f}')


def compare_targets(
    config: Path, precision: str, seeds: Sequence[int], names: Sequence[str], python: Path
) -> None:
    """Train each named side to the target with each seed; print the medians."""
    sides = {
        NAME: partial(train_program, config, precision),
        **torch_sides(train_torch, python=python, config=config, precision=precision),
    }
    results: dict[str, list[dict]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            last = sides[name](seed=seed)
            results[name].append(last)
            print(
                f'seed {seed}  {name:34s} {last["epochs"]} epochs, {last["time_to_train_s"]:7.1f} '
                's, Top-1 ' + ' '.join(f'{100 * t:.2f}' for t in last['top1']),
                file=sys.stderr,
            )
    medians = {
        name: statistics.median(
            r['time_to_train_s'] if r['is_converged'] else math.inf for r in runs
        )
        for name, runs in results.items()
    }
    for name, seconds in medians.items():
        epochs = ', '.join(
            str(r['epochs']) if r['is_converged'] else 'not reached' for r in results[name]
        )
        ratio = f'ratio of {names[0]} {medians[names[0]] / seconds:.3f}'
        print(f'{name:34s} median {seconds:7.1f} s; epochs {epochs}; {ratio}')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('what', choices=['step', 'target'])
    add('config', nargs='?', type=lambda p: Path(p).resolve())
    add('--device', choices=['cpu', 'gpu'], default='cpu', help='of step (default cpu)')
    add('--batch-sizes', type=int, nargs='+', help='of step (default 32, or 64 208 408 on a GPU)')
    add(
        '--torch-python',
        type=os.path.abspath,
        default=ROOT / 'benchmarks/.venv/bin/python',
        help='Python with PyTorch and NumPy (default: that of benchmarks/setup.sh)',
    )
    add(
        '--precision',
        choices=['float32', 'bfloat16', 'float16'],
        help='default float32, or float16 on a GPU',
    )
    add('--rounds', type=int, default=3, help='of step (default 3)')
    add(
        '--seeds',
        type=int,
        nargs='+',
        default=[0, 1, 2],
        help='of runs, for target (default 0 1 2)',
    )
    add(
        '--sides',
        nargs='+',
        choices=[NAME, *SIDES],
        default=[],
        help='mlperf-rn50 first (default: all, but on a GPU and for target only two torch sides)',
    )
    options = parser.parse_args()
    config, python, is_gpu = options.config, options.torch_python, options.device == 'gpu'
    precision = options.precision or ('float16' if is_gpu else 'float32')
    if (options.what == 'step') != (config is None):
        parser.error('CONFIG: required for target, not allowed for step')
    if options.what == 'target':
        names = options.sides or [NAME, *list(SIDES)[2:]]
        compare_targets(config, precision, options.seeds, names, python)
        return
    # the GPU recipe of published runs, which train with LARS
    recipe = '--config tests/gpu/resnet50.yaml --optimizer.name sgd'.split() if is_gpu else []
    num_warmup, num = (20, 60) if is_gpu else (2, 6)
    for size in options.batch_sizes or ([64, 208, 408] if is_gpu else [32]):
        case = f'--batch-sizes {size} --precisions {precision} --warmup-steps {num_warmup}'
        own = partial(bench, 'train', *recipe, *case.split(), '--steps', num)
        torch = torch_sides(
            peer,
            python=python,
            what='step',
            device=options.device,
            precision=precision,
            batch_size=size,
            num_warmup=num_warmup,
            num=num,
        )
        sides = {NAME: own, **torch}
        names = options.sides or list(sides)[: 3 if is_gpu else None]
        compare(f'batch {size}, {precision}', {n: sides[n] for n in names}, options.rounds)


if __name__ == '__main__':
    main()
