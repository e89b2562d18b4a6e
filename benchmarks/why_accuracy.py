"""Plant training mistakes, and count those that `mlperf-rn50 why RUN --probe` names, and the
healthy runs it accuses.

Mistakes are planted on digits and on a part of CIFAR-10, in the data, the labels, the recipe or the
code. The healthy runs differ in seed, batch, schedule, augmentation, ranks and part of the data. A
mistake in the code is a function of this file that changes the program in the training process, but
not in that of `why`. Each run names the first healthy run of its data set as run.reference.

Usage: .venv/bin/python benchmarks/why_accuracy.py [--work FOLDER] [--only-why] [NAME
...] Each run is in FOLDER/runs/NAME and is trained only once. NAME: mistakes and healthy runs of
the table (default: all)
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from compare import ROOT, ended_runs, top1_of_epochs
from PIL import Image
from tabulate import tabulate

from mlperf_rn50.cli import main as run_command
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.command import pack
from mlperf_rn50.data.prepare.samples import Dataset, digits, from_pixels
from mlperf_rn50.data.recordio import MANIFEST_NAME, load_manifest

NUM_TRAIN, NUM_HELD = 2500, 1000  # images of the part of CIFAR-10
BATCH = 64
TARGETS = {'digits': 0.9, 'cifar10': 0.33}
COMMON = (
    'model.name=resnet18 data.image_size=16 data.resize_shorter=16 train.num_warmup_steps=0 '
    'checkpoint.period_epochs=0 run.metrics_period_steps=5 run.seed=1 train.max_epochs=6 '
    f'train.global_batch_size={BATCH} schedule.decay_epochs=6'
)
CIFAR10 = 'schedule.base_lr=0.05 train.eval_batch_size=250'
MOST_NAMED = 2  # `why` names the cause, or the two that remain


@dataclass(frozen=True)
class Case:
    """A run with a mistake, or a healthy one, which has no causes."""

    name: str
    dataset: str
    causes: str = ''  # any of which is right
    options: str = ''
    change: Callable[[Dataset], Dataset] | None = None
    patch: Callable[[], None] | None = None
    ranks: int = 1

    @property
    def slug(self) -> str:
        return ''.join(c if c.isalnum() else '_' for c in self.name)

    @property
    def lowers_accuracy(self) -> bool:
        return self.causes not in ('', 'leak')


# Mistakes in data and labels


def relabel(split: str, rule: Callable[[int, np.random.Generator], int]) -> Any:
    def change(d: Dataset) -> Dataset:
        random = np.random.default_rng(0)
        return replace(
            d, **{split: [replace(s, label=int(rule(s.label, random))) for s in getattr(d, split)]}
        )

    return change


def redraw(split: str, rule: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Return a change that applies a rule to the pixels of a split."""

    def change(d: Dataset) -> Dataset:
        samples = getattr(d, split)
        pixels = [rule(np.asarray(Image.open(io.BytesIO(s.read())))) for s in samples]
        return replace(d, **{split: from_pixels(pixels, [s.label for s in samples], split)})

    return change


def exchange(classes: dict[int, int]) -> Any:
    return lambda label, _: classes.get(label, label)


def blur(pixels: np.ndarray) -> np.ndarray:
    """Reduce an image to a quarter of its side, and enlarge it."""
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((image.width // 4, image.height // 4)).resize(image.size))


def leak(d: Dataset) -> Dataset:
    copies = [replace(s, name=f'train/{NUM_TRAIN + i}') for i, s in enumerate(d.validation)]
    return replace(d, train=[*d.train[: NUM_TRAIN - len(copies)], *copies])


# Mistakes in the code


def leave_unshuffled() -> None:
    from mlperf_rn50.data import shards

    shards.epoch_order = lambda shard, seed, epoch: np.resize(
        np.arange(shard.num_samples), shard.num_positions
    )


def give_all_ranks_one_shard() -> None:
    """Let all ranks read the part of rank 0, which is the same in every epoch."""
    from mlperf_rn50.data import shards
    from mlperf_rn50.train.plan import Plan

    order, shard = shards.epoch_order, Plan.train_shard
    shards.epoch_order = lambda shard, seed, epoch: order(shard, seed, 0)
    Plan.train_shard = lambda self, rank=0: shard(self, 0)  # type: ignore[method-assign]


def train_last_layer() -> None:
    from mlperf_rn50.train import trainer

    whole = trainer.Optimizer
    trainer.Optimizer = lambda params, *rest: whole(  # type: ignore[misc, assignment]
        {name: p for name, p in params.items() if name.startswith('fc')}, *rest
    )


def sum_gradients() -> None:
    """Update with the sum of the gradients of a batch instead of their mean."""
    from mlperf_rn50.train.optimizer import Optimizer

    step = Optimizer.step

    def summed(self: Any, lr: Any, fraction: Any = 1.0, rescale: Any = 1.0, *rest: Any) -> Any:
        return step(self, lr, fraction, rescale * BATCH, *rest)

    Optimizer.step = summed  # type: ignore[method-assign]


def normalise_training() -> None:
    """Normalise training images, but not those of the evaluation, for values from 0 to 1."""
    from mlperf_rn50.data import pipeline

    build = pipeline.build_pipeline

    def changed(source: Any, size: int, config: Any, is_training: bool, device: Any) -> Any:
        if is_training:
            config = replace(config, data=replace(config.data, mean=(0.5,) * 3, std=(0.25,) * 3))
        return build(source, size, config, is_training, device)

    pipeline.build_pipeline = changed


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of each line of a table."""
    return [[cell.strip() for cell in line.split('|')] for line in text.strip().splitlines()]


PERMUTED = dict(enumerate(np.random.default_rng(7).permutation(10)))
# name, data set and causes of each mistake, any of which is right
MISTAKES = """
validation labels off by one             | digits  | labels_shifted
two classes swapped in training          | digits  | labels_swapped
half of the classes missing in training  | digits  | classes_missing
validation pixels 0 to 16, not 0 to 255  | digits  | value_range normalisation
learning rate a tenth                    | digits  | learning_rate
stopped after 2 of 6 epochs              | digits  | epochs
decay ends after 1 of 6 epochs           | digits  | decay
mirrored digits, crops from 5 %          | digits  | augmentation crop
statistics of BatchNorm not updated      | digits  | batch_norm
sorted records, not shuffled             | digits  | shuffle
40 % random labels                       | cifar10 | label_noise
validation stored as BGR                 | cifar10 | channel_order
validation images in training            | cifar10 | leak
learning rate times 30, no warm-up       | cifar10 | learning_rate warmup
weight decay times 200                   | cifar10 | weight_decay
evaluation on the centre quarter         | cifar10 | crop
training normalised for 0 to 1           | cifar10 | normalisation value_range
all ranks read one shard                 | cifar10 | equal_shards
only the last layer trained              | cifar10 | frozen
three classes in a cycle                 | cifar10 | labels_swapped
validation classes permuted              | cifar10 | labels_swapped
random validation labels                 | cifar10 | label_noise
blurred training images                  | cifar10 | blur_or_noise
blurred validation images                | digits  | blur_or_noise
gradients summed over the batch          | cifar10 | gradient_scale learning_rate
"""
# of the mistakes in the recipe
OPTIONS = {
    'learning rate a tenth': 'schedule.base_lr=0.002',
    'stopped after 2 of 6 epochs': 'train.max_epochs=2',
    'decay ends after 1 of 6 epochs': 'schedule.warmup_epochs=0.5 schedule.decay_epochs=1',
    'mirrored digits, crops from 5 %': 'data.crop=random_resized data.min_area=0.05 '
    'data.max_area=0.3 data.mirror_probability=0.5',
    'statistics of BatchNorm not updated': 'model.bn_momentum=0.999',
    'learning rate times 30, no warm-up': 'schedule.base_lr=3 schedule.warmup_epochs=0',
    'weight decay times 200': 'optimizer.weight_decay=0.1',
    'evaluation on the centre quarter': 'data.resize_shorter=32',
}
# of the mistakes in data and labels
CHANGES = {
    'validation labels off by one': relabel('validation', lambda label, _: (label + 1) % 10),
    'two classes swapped in training': relabel('train', exchange({3: 8, 8: 3})),
    'half of the classes missing in training': lambda d: replace(
        d, train=[s for s in d.train if s.label < 5]
    ),
    'validation pixels 0 to 16, not 0 to 255': redraw(
        'validation', lambda p: np.rint(p * (16 / 255)).astype(np.uint8)
    ),
    'sorted records, not shuffled': lambda d: replace(
        d, train=sorted(d.train, key=lambda s: s.label)
    ),
    '40 % random labels': relabel(
        'train', lambda label, r: r.integers(10) if r.random() < 0.4 else label
    ),
    'validation stored as BGR': redraw('validation', lambda p: np.ascontiguousarray(p[..., ::-1])),
    'validation images in training': leak,
    'three classes in a cycle': relabel('train', exchange({3: 4, 4: 5, 5: 3})),
    'validation classes permuted': relabel('validation', exchange(PERMUTED)),
    'random validation labels': relabel('validation', lambda _, random: random.integers(10)),
    'blurred training images': redraw('train', blur),
    'blurred validation images': redraw('validation', blur),
}
# of the mistakes in the code
PATCHES = {
    'sorted records, not shuffled': leave_unshuffled,
    'training normalised for 0 to 1': normalise_training,
    'all ranks read one shard': give_all_ranks_one_shard,
    'only the last layer trained': train_last_layer,
    'gradients summed over the batch': sum_gradients,
}
# data set, ranks, options and, if it is a part, the training images of each healthy run
HEALTHY = """
digits  | 1 |
digits  | 1 |
digits  | 1 |
digits  | 1 | train.global_batch_size=32 schedule.base_lr=0.01
digits  | 1 | train.global_batch_size=32 schedule.base_lr=0.01
digits  | 1 | train.global_batch_size=128 schedule.base_lr=0.03
digits  | 1 | schedule.decay=cosine
digits  | 1 | schedule.decay=cosine
digits  | 1 | schedule.decay=step schedule.step_epochs=[4,5]
digits  | 1 | schedule.decay=step schedule.step_epochs=[4,5]
digits  | 1 | data.crop=padded data.crop_padding=1
digits  | 1 | data.crop=padded data.crop_padding=1
digits  | 1 | schedule.poly_power=1
digits  | 1 | train.label_smoothing=0.1
digits  | 1 | optimizer.nesterov=true
digits  | 1 | schedule.warmup_epochs=0.5
digits  | 1 | schedule.base_lr=0.03
digits  | 1 | data.last_batch=wrap
digits  | 2 |
digits  | 2 | schedule.decay=cosine
digits  | 2 | schedule.decay=step schedule.step_epochs=[4,5]
digits  | 1 |  | 0:1100
digits  | 1 | schedule.decay=cosine | 300:1437
cifar10 | 1 |
cifar10 | 1 |
cifar10 | 1 | schedule.decay=cosine
cifar10 | 1 | train.label_smoothing=0
cifar10 | 1 | data.crop=none
cifar10 | 2 |
cifar10 | 1 |  | 100:2500
"""


def mistake(name: str, dataset: str, causes: str) -> Case:
    options, change, patch = (table.get(name) for table in (OPTIONS, CHANGES, PATCHES))
    ranks = 2 if causes == 'equal_shards' else 1
    return Case(name, dataset, causes, options or '', change, patch, ranks)


def healthy(number: int, dataset: str, ranks: str, options: str, images: str = '') -> Case:
    part = slice(*map(int, images.split(':'))) if images else slice(None)
    change = (lambda d: replace(d, train=d.train[part])) if images else None
    options = f'run.seed={number} {options}'
    return Case(f'healthy {dataset} {number}', dataset, '', options, change, ranks=int(ranks))


GOOD = [
    healthy(number, *cells)
    for dataset in TARGETS
    for number, cells in enumerate(c for c in cells_of(HEALTHY) if c[0] == dataset)
]
CASES = {case.name: case for case in (*GOOD, *(mistake(*cells) for cells in cells_of(MISTAKES)))}


@cache
def load_data(dataset: str) -> Dataset:
    if dataset == 'digits':
        return digits()
    whole = cifar10(None)
    return replace(whole, train=whole.train[:NUM_TRAIN], validation=whole.train[-NUM_HELD:])


def prepare(case: Case, work: Path) -> str:
    """Pack the data of a run unless they exist; return the options that describe them."""
    folder = work / 'data' / (case.slug if case.change else case.dataset)
    if not (folder / MANIFEST_NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        whole = load_data(case.dataset)
        pack(case.change(whole) if case.change else whole, folder)
    train, validation = (part['num_images'] for part in load_manifest(folder)['splits'].values())
    return f'data.dir={folder} data.num_train={train} data.num_val={validation}'


def accuracy(run: Path) -> float | None:
    """Return the best Top-1 of a complete run; None without an evaluation."""
    return max((top1 for lines in ended_runs(run) for top1 in top1_of_epochs(lines)), default=None)


def train(case: Case, run: Path, work: Path) -> None:
    first = run.with_name(f'healthy_{case.dataset}_0')
    if accuracy(run) is not None:
        return
    shutil.rmtree(run, ignore_errors=True)  # an incomplete run
    options = (
        f'{COMMON} {CIFAR10 if case.dataset == "cifar10" else ""} {prepare(case, work)} '
        f'train.target_accuracy={TARGETS[case.dataset]} {case.options} run.dir={run} '
        f'run.reference=[{"" if run == first else first}]'
    )
    config = ROOT / f'launch/configs/{case.dataset}_cpu.yaml'
    words = ['train', '--config', config, *(f'--{option}' for option in options.split())]
    command = ['launch/ranks.sh', case.ranks, sys.executable, __file__, '--run', case.name, *words]
    subprocess.run([str(w) for w in command], cwd=ROOT)


def named_causes(run: Path) -> list[str]:
    """Return the causes that `why` names; a failed call counts as a cause of its own."""
    command = [sys.executable, '-m', 'mlperf_rn50', 'why', run, '--probe', '--format', 'json']
    done = subprocess.run([str(w) for w in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return [f'exit code {done.returncode}: {" ".join(done.stderr.split())[-60:]}']
    return [c['cause'] for c in json.loads(done.stdout)['accuracy']['causes']]


def judge(case: Case, reached: float | None, named: list[str]) -> str:
    """Return the result of a run, given its accuracy and the causes that `why` named."""
    if reached is None:
        return 'not trained'
    if (reached < TARGETS[case.dataset]) != case.lowers_accuracy:
        return 'unfit'
    is_named = bool(set(named) & set(case.causes.split())) and len(named) <= MOST_NAMED
    return 'ok' if (is_named if case.causes else not named) else 'wrong'


def main() -> None:
    if sys.argv[1:2] == ['--run']:  # a training process
        if patch := CASES[sys.argv[2]].patch:
            patch()
        sys.exit(run_command(sys.argv[3:]))
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('names', nargs='*', help='runs (default: all)')
    parser.add_argument('--work', type=Path, default=ROOT / 'logs/why_accuracy')
    parser.add_argument('--only-why', action='store_true', help='use only runs that exist')
    options = parser.parse_args()
    work, rows = options.work.resolve(), []
    results: dict[bool, list[str]] = {True: [], False: []}  # of runs with a mistake or without
    for case in [CASES[name] for name in options.names] or CASES.values():
        run = work / 'runs' / case.slug
        if not options.only_why:
            train(case, run, work)
        reached = accuracy(run)
        named = named_causes(run) if reached is not None else []
        result = judge(case, reached, named)
        results[bool(case.causes)].append(result)
        rows.append(
            [
                case.name,
                case.dataset,
                case.causes.replace(' ', ' or ') or 'none',
                f'{100 * (reached or 0):.1f}',
                f'{100 * TARGETS[case.dataset]:.0f}',
                ', '.join(named) or 'none',
                result,
            ]
        )
        print('  '.join(rows[-1]), file=sys.stderr)
    print(tabulate(rows, ('run', 'data', 'expected', 'Top-1', 'target', 'named', 'result')))
    planted, good = ([r for r in results[kind] if r != 'not trained'] for kind in (True, False))
    print(
        f'named: {planted.count("ok")} of {len(planted)} mistakes; accused: '
        f'{good.count("wrong")} of {len(good)} healthy runs; without effect or not healthy: '
        f'{(planted + good).count("unfit")}'
    )


if __name__ == '__main__':
    main()
