"""Plant training mistakes, and count those that `mlperf-rn50 why RUN --probe` names, and the
healthy runs it accuses.

Mistakes are planted on digits and on a part of CIFAR-10, in the data, the labels, the recipe or the
code. The healthy runs differ in seed, batch, schedule, augmentation, ranks and part of the data. A
mistake in the code is a function of this file that changes the program in the training process, but
not in that of `why`. Each run names the first healthy run of its data set as run.reference.

Usage: .venv/bin/python benchmarks/why_accuracy.py [--work FOLDER] [--only-train | --only-why] [NAME
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
from compare import PYTHON, ROOT, read_metrics
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
    is_better: bool = False  # whether the mistake raises the accuracy

    @property
    def slug(self) -> str:
        return ''.join(c if c.isalnum() else '_' for c in self.name)


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
    from PIL import Image

    def change(d: Dataset) -> Dataset:
        samples = getattr(d, split)
        pixels = [rule(np.asarray(Image.open(io.BytesIO(s.read())))) for s in samples]
        return replace(d, **{split: from_pixels(pixels, [s.label for s in samples], split)})

    return change


def exchange(classes: dict[int, int]) -> Any:
    return lambda label, _: classes.get(label, label)


def blur(pixels: np.ndarray) -> np.ndarray:
    """Reduce an image to a quarter of its side, and enlarge it."""
    from PIL import Image

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


def on_digits(name: str, causes: str, options: str = '', **keys: Any) -> Case:
    return Case(name, 'digits', causes, options, **keys)


def on_cifar10(name: str, causes: str, options: str = '', **keys: Any) -> Case:
    return Case(name, 'cifar10', causes, options, **keys)


ANY = relabel('validation', lambda _, random: random.integers(10))
PERMUTED = dict(enumerate(np.random.default_rng(7).permutation(10)))
MISTAKES = [
    on_digits(
        'validation labels off by one',
        'labels_shifted',
        change=relabel('validation', lambda label, _: (label + 1) % 10),
    ),
    on_digits(
        'two classes swapped in training',
        'labels_swapped',
        change=relabel('train', exchange({3: 8, 8: 3})),
    ),
    on_digits(
        'half of the classes missing in training',
        'classes_missing',
        change=lambda d: replace(d, train=[s for s in d.train if s.label < 5]),
    ),
    on_digits(
        'validation pixels 0 to 16, not 0 to 255',
        'value_range normalisation',
        change=redraw('validation', lambda p: np.rint(p * (16 / 255)).astype(np.uint8)),
    ),
    on_digits('learning rate a tenth', 'learning_rate', 'schedule.base_lr=0.002'),
    on_digits('stopped after 2 of 6 epochs', 'epochs', 'train.max_epochs=2'),
    on_digits(
        'decay ends after 1 of 6 epochs',
        'decay',
        'schedule.warmup_epochs=0.5 schedule.decay_epochs=1',
    ),
    on_digits(
        'mirrored digits, crops from 5 %',
        'augmentation crop',
        'data.crop=random_resized data.min_area=0.05 data.max_area=0.3 data.mirror_probability=0.5',
    ),
    on_digits('statistics of BatchNorm not updated', 'batch_norm', 'model.bn_momentum=0.999'),
    on_digits(
        'sorted records, not shuffled',
        'shuffle',
        change=lambda d: replace(d, train=sorted(d.train, key=lambda s: s.label)),
        patch=leave_unshuffled,
    ),
    on_cifar10(
        '40 % random labels',
        'label_noise',
        change=relabel('train', lambda label, r: r.integers(10) if r.random() < 0.4 else label),
    ),
    on_cifar10(
        'validation stored as BGR',
        'channel_order',
        change=redraw('validation', lambda p: np.ascontiguousarray(p[..., ::-1])),
    ),
    on_cifar10('validation images in training', 'leak', change=leak, is_better=True),
    on_cifar10(
        'learning rate times 30, no warm-up',
        'learning_rate warmup',
        'schedule.base_lr=3 schedule.warmup_epochs=0',
    ),
    on_cifar10('weight decay times 200', 'weight_decay', 'optimizer.weight_decay=0.1'),
    on_cifar10('evaluation on the centre quarter', 'crop', 'data.resize_shorter=32'),
    on_cifar10(
        'training normalised for 0 to 1', 'normalisation value_range', patch=normalise_training
    ),
    on_cifar10('all ranks read one shard', 'equal_shards', patch=give_all_ranks_one_shard, ranks=2),
    on_cifar10('only the last layer trained', 'frozen', patch=train_last_layer),
    on_cifar10(
        'three classes in a cycle',
        'labels_swapped',
        change=relabel('train', exchange({3: 4, 4: 5, 5: 3})),
    ),
    on_cifar10(
        'validation classes permuted',
        'labels_swapped',
        change=relabel('validation', exchange(PERMUTED)),
    ),
    on_cifar10('random validation labels', 'label_noise', change=ANY),
    on_cifar10('blurred training images', 'blur_or_noise', change=redraw('train', blur)),
    on_digits('blurred validation images', 'blur_or_noise', change=redraw('validation', blur)),
    on_cifar10(
        'gradients summed over the batch', 'gradient_scale learning_rate', patch=sum_gradients
    ),
]
COSINE, STEPS = 'schedule.decay=cosine', 'schedule.decay=step schedule.step_epochs=[4,5]'
# options of healthy runs by number, as often as given, and their ranks
HEALTHY = {
    'digits': [
        *[('', 1)] * 3,
        *[('train.global_batch_size=32 schedule.base_lr=0.01', 1)] * 2,
        ('train.global_batch_size=128 schedule.base_lr=0.03', 1),
        *[(COSINE, 1)] * 2,
        *[(STEPS, 1)] * 2,
        *[('data.crop=padded data.crop_padding=1', 1)] * 2,
        ('schedule.poly_power=1', 1),
        ('train.label_smoothing=0.1', 1),
        ('optimizer.nesterov=true', 1),
        ('schedule.warmup_epochs=0.5', 1),
        ('schedule.base_lr=0.03', 1),
        ('data.last_batch=wrap', 1),
        ('', 2),
        (COSINE, 2),
        (STEPS, 2),
        ('', 1),
        (COSINE, 1),
    ],
    'cifar10': [
        *[('', 1)] * 2,
        (COSINE, 1),
        ('train.label_smoothing=0', 1),
        ('data.crop=none', 1),
        ('', 2),
        ('', 1),
    ],
}
# parts of the training images, for some of the healthy runs
PARTS = {
    ('digits', 21): slice(1100),
    ('digits', 22): slice(300, None),
    ('cifar10', 6): slice(100, None),
}


def healthy(dataset: str, number: int) -> Case:
    options, ranks = HEALTHY[dataset][number]
    change, part = None, PARTS.get((dataset, number))
    if part:
        change = lambda d: replace(d, train=d.train[part])  # noqa: E731
    options = f'run.seed={number} {options}'
    return Case(f'healthy {dataset} {number}', dataset, '', options, change, ranks=ranks)


GOOD = [healthy(dataset, k) for dataset, runs in HEALTHY.items() for k in range(len(runs))]
CASES = {case.name: case for case in (*GOOD, *MISTAKES)}


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
    """Return the best Top-1 of a complete run, or None."""
    lines = read_metrics(run)
    top1 = [m['num_top1'] / m['num_images'] for m in lines if m.get('event') == 'eval']
    return max(top1, default=0.0) if lines[-1].get('event') == 'end' else None


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
    if case.patch or case.ranks > 1:
        start = ['launch/ranks.sh', case.ranks] if case.ranks > 1 else []
        command = [*start, PYTHON, __file__, '--run', case.name, *words]
        subprocess.run([str(w) for w in command], cwd=ROOT)
    else:  # in this process, to import MXNet only once
        run_command([str(w) for w in words])


def named_causes(run: Path) -> list[str]:
    """Return the causes that `why` names; a failed call counts as a cause of its own."""
    command = [PYTHON, '-m', 'mlperf_rn50', 'why', run, '--probe', '--format', 'json']
    done = subprocess.run([str(w) for w in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return [f'exit code {done.returncode}: {" ".join(done.stderr.split())[-60:]}']
    return [c['cause'] for c in json.loads(done.stdout)['accuracy']['causes']]


def judge(case: Case, reached: float | None, named: list[str] | None) -> str:
    """Return the result of a run; named: causes, or None if `why` was not run."""
    if reached is None:
        return 'not trained'
    if (reached < TARGETS[case.dataset]) != bool(case.causes and not case.is_better):
        return 'unfit'
    if named is None:
        return 'trained'
    is_named = bool(set(named) & set(case.causes.split())) and len(named) <= MOST_NAMED
    return 'ok' if (is_named if case.causes else not named) else 'wrong'


def main() -> None:
    if sys.argv[1:2] == ['--run']:  # the training process of a mistake in the code
        if patch := CASES[sys.argv[2]].patch:
            patch()
        sys.exit(run_command(sys.argv[3:]))
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('names', nargs='*', help='runs (default: all)')
    parser.add_argument('--work', type=Path, default=ROOT / 'logs/why_accuracy')
    parser.add_argument('--only-train', action='store_true', help='do not run `why`')
    parser.add_argument('--only-why', action='store_true', help='use only runs that exist')
    options = parser.parse_args()
    work, rows = options.work.resolve(), []
    results: dict[bool, list[str]] = {True: [], False: []}  # of runs with a mistake or without
    for case in [CASES[name] for name in options.names] or CASES.values():
        run = work / 'runs' / case.slug
        if not options.only_why:
            train(case, run, work)
        reached = accuracy(run)
        named = None if options.only_train or reached is None else named_causes(run)
        result = judge(case, reached, named)
        results[bool(case.causes)].append(result)
        rows.append(
            [
                case.name,
                case.dataset,
                case.causes.replace(' ', ' or ') or 'none',
                f'{100 * (reached or 0):.1f}',
                f'{100 * TARGETS[case.dataset]:.0f}',
                ', '.join(named or ()) or 'none',
                result,
            ]
        )
        print('  '.join(rows[-1]), file=sys.stderr, flush=True)
    print(tabulate(rows, ('run', 'data', 'expected', 'Top-1', 'target', 'named', 'result')))
    if not options.only_train:
        planted, good = ([r for r in results[kind] if r != 'not trained'] for kind in (True, False))
        print(
            f'named: {planted.count("ok")} of {len(planted)} mistakes; accused: '
            f'{good.count("wrong")} of {len(good)} healthy runs; without effect or not healthy: '
            f'{(planted + good).count("unfit")}'
        )


if __name__ == '__main__':
    main()
