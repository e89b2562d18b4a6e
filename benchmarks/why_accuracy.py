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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from compare import PYTHON, ROOT, read_metrics
from tabulate import tabulate

from mlperf_rn50.cli import main as run_command
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.pack import pack
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits, from_pixels
from mlperf_rn50.data.records import MANIFEST_NAME, RecordFile, load_manifest

NUM_TRAIN, NUM_HELD = 2500, 1000  # images of the part of CIFAR-10
RECIPES: dict[str, dict[str, object]] = {
    'digits': {
        'train.global_batch_size': 64,
        'train.max_epochs': 6,
        'train.target_accuracy': 0.9,
        'schedule.decay_epochs': 6,
    },
    'cifar10': {
        'train.global_batch_size': 64,
        'train.max_epochs': 6,
        'train.target_accuracy': 0.33,
        'schedule.base_lr': 0.05,
        'schedule.decay_epochs': 6,
        'train.eval_batch_size': 250,
    },
}
MOST_NAMED = 2  # `why` names the cause, or the two that remain
COMMON = {
    'model.name': 'resnet18',
    'data.image_size': 16,
    'data.resize_shorter': 16,
    'train.num_warmup_steps': 0,
    'checkpoint.period_epochs': 0,
    'run.metrics_period_steps': 5,
}
Change = Callable[[Dataset], Dataset]


@dataclass(frozen=True)
class Case:
    """A run with a mistake, or a healthy one, which has no causes; is_better: the mistake raises
    the accuracy."""

    name: str
    dataset: str
    causes: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    change: Change | None = None
    patch: Callable[[], None] | None = None
    ranks: int = 1
    is_better: bool = False


# Mistakes in data and labels


def relabel(split: str, rule: Callable[[Sample, np.random.Generator], int], d: Dataset) -> Dataset:
    random = np.random.default_rng(0)
    return replace(d, **{split: [replace(s, label=rule(s, random)) for s in getattr(d, split)]})


def redraw(split: str, rule: Callable[[np.ndarray], np.ndarray], d: Dataset) -> Dataset:
    """Apply a rule to the pixels of a split."""
    from PIL import Image

    samples = getattr(d, split)
    pixels = [rule(np.asarray(Image.open(io.BytesIO(s.read())))) for s in samples]
    return replace(d, **{split: from_pixels(pixels, [s.label for s in samples], split)})


def keep(rule: Callable[[Sample], bool], d: Dataset) -> Dataset:
    return replace(d, train=[s for s in d.train if rule(s)])


def shift(s: Sample, _: np.random.Generator) -> int:
    return (s.label + 1) % 10


def swap(s: Sample, _: np.random.Generator) -> int:
    return {3: 8, 8: 3}.get(s.label, s.label)


def noise(s: Sample, random: np.random.Generator) -> int:
    return int(random.integers(10)) if random.random() < 0.4 else s.label


def rotate(s: Sample, _: np.random.Generator) -> int:
    return {3: 4, 4: 5, 5: 3}.get(s.label, s.label)


def permute(s: Sample, _: np.random.Generator) -> int:
    return int(np.random.default_rng(7).permutation(10)[s.label])


def any_class(s: Sample, random: np.random.Generator) -> int:
    return int(random.integers(10))


def blur(pixels: np.ndarray) -> np.ndarray:
    """Reduce an image to a quarter of its side, and enlarge it."""
    from PIL import Image

    image = Image.fromarray(pixels)
    return np.asarray(image.resize((image.width // 4, image.height // 4)).resize(image.size))


def leak(d: Dataset) -> Dataset:
    copies = [replace(s, name=f'train/{NUM_TRAIN + i}') for i, s in enumerate(d.validation)]
    return replace(d, train=[*d.train[: NUM_TRAIN - len(copies)], *copies])


def sort_by_class(d: Dataset) -> Dataset:
    return replace(d, train=sorted(d.train, key=lambda s: s.label))


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

    step, size = Optimizer.step, RECIPES['cifar10']['train.global_batch_size']
    Optimizer.step = lambda self, lr, fraction=1.0, rescale=1.0, is_finite=None: step(  # type: ignore[method-assign]
        self, lr, fraction, rescale * size, is_finite
    )


def normalise_training(mean: float, std: float) -> None:
    """Normalise training images, but not those of the evaluation, with other constants."""
    from mlperf_rn50.data import pipeline

    build = pipeline.build_pipeline

    def changed(
        source: Any, size: int, config: Any, is_training: bool, device_id: int | None
    ) -> Any:
        if is_training:
            config = replace(config, data=replace(config.data, mean=(mean,) * 3, std=(std,) * 3))
        return build(source, size, config, is_training, device_id)

    pipeline.build_pipeline = changed


MISTAKES = [
    Case(
        'validation labels off by one',
        'digits',
        ('labels_shifted',),
        change=partial(relabel, 'validation', shift),
    ),
    Case(
        'two classes swapped in training',
        'digits',
        ('labels_swapped',),
        change=partial(relabel, 'train', swap),
    ),
    Case(
        'half of the classes missing in training',
        'digits',
        ('classes_missing',),
        change=partial(keep, lambda s: s.label < 5),
    ),
    Case(
        'validation pixels 0 to 16, not 0 to 255',
        'digits',
        ('value_range', 'normalisation'),
        change=partial(redraw, 'validation', lambda p: np.rint(p * (16 / 255)).astype(np.uint8)),
    ),
    Case('learning rate a tenth', 'digits', ('learning_rate',), {'schedule.base_lr': 0.002}),
    Case('stopped after 2 of 6 epochs', 'digits', ('epochs',), {'train.max_epochs': 2}),
    Case(
        'decay ends after 1 of 6 epochs',
        'digits',
        ('decay',),
        {'schedule.warmup_epochs': 0.5, 'schedule.decay_epochs': 1},
    ),
    Case(
        'mirrored digits, crops from 5 %',
        'digits',
        ('augmentation', 'crop'),
        {
            'data.crop': 'random_resized',
            'data.min_area': 0.05,
            'data.max_area': 0.3,
            'data.mirror_probability': 0.5,
        },
    ),
    Case(
        'statistics of BatchNorm not updated',
        'digits',
        ('batch_norm',),
        {'model.bn_momentum': 0.999},
    ),
    Case(
        'sorted records, not shuffled',
        'digits',
        ('shuffle',),
        change=sort_by_class,
        patch=leave_unshuffled,
    ),
    Case(
        '40 % random labels', 'cifar10', ('label_noise',), change=partial(relabel, 'train', noise)
    ),
    Case(
        'validation stored as BGR',
        'cifar10',
        ('channel_order',),
        change=partial(redraw, 'validation', lambda p: np.ascontiguousarray(p[..., ::-1])),
    ),
    Case('validation images in training', 'cifar10', ('leak',), change=leak, is_better=True),
    Case(
        'learning rate times 30, no warm-up',
        'cifar10',
        ('learning_rate', 'warmup'),
        {'schedule.base_lr': 3, 'schedule.warmup_epochs': 0},
    ),
    Case('weight decay times 200', 'cifar10', ('weight_decay',), {'optimizer.weight_decay': 0.1}),
    Case('evaluation on the centre quarter', 'cifar10', ('crop',), {'data.resize_shorter': 32}),
    Case(
        'training normalised for 0 to 1',
        'cifar10',
        ('normalisation', 'value_range'),
        patch=partial(normalise_training, 0.5, 0.25),
    ),
    Case(
        'all ranks read one shard',
        'cifar10',
        ('equal_shards',),
        patch=give_all_ranks_one_shard,
        ranks=2,
    ),
    Case('only the last layer trained', 'cifar10', ('frozen',), patch=train_last_layer),
    Case(
        'three classes in a cycle',
        'cifar10',
        ('labels_swapped',),
        change=partial(relabel, 'train', rotate),
    ),
    Case(
        'validation classes permuted',
        'cifar10',
        ('labels_swapped',),
        change=partial(relabel, 'validation', permute),
    ),
    Case(
        'random validation labels',
        'cifar10',
        ('label_noise',),
        change=partial(relabel, 'validation', any_class),
    ),
    Case(
        'blurred training images',
        'cifar10',
        ('blur_or_noise',),
        change=partial(redraw, 'train', blur),
    ),
    Case(
        'blurred validation images',
        'digits',
        ('blur_or_noise',),
        change=partial(redraw, 'validation', blur),
    ),
    Case(
        'gradients summed over the batch',
        'cifar10',
        ('gradient_scale', 'learning_rate'),
        patch=sum_gradients,
    ),
]


def healthy(dataset: str, number: int, options: dict[str, object], **more: Any) -> Case:
    return Case(f'healthy {dataset} {number}', dataset, (), {'run.seed': number, **options}, **more)


SMALLER = {'train.global_batch_size': 32, 'schedule.base_lr': 0.01}
LARGER = {'train.global_batch_size': 128, 'schedule.base_lr': 0.03}
COSINE = {'schedule.decay': 'cosine'}
STEPS = {'schedule.decay': 'step', 'schedule.step_epochs': '[4, 5]'}
SHIFTS = {'data.crop': 'padded', 'data.crop_padding': 1}
DIGITS: list[dict[str, object]] = [
    {},
    {},
    {},
    SMALLER,
    SMALLER,
    LARGER,
    COSINE,
    COSINE,
    STEPS,
    STEPS,
    SHIFTS,
    SHIFTS,
    {'schedule.poly_power': 1},
    {'train.label_smoothing': 0.1},
    {'optimizer.nesterov': 'true'},
    {'schedule.warmup_epochs': 0.5},
    {'schedule.base_lr': 0.03},
    {'data.last_batch': 'wrap'},
]
HEALTHY = [
    *(healthy('digits', i, options) for i, options in enumerate(DIGITS)),
    healthy('digits', 18, {}, ranks=2),
    healthy('digits', 19, COSINE, ranks=2),
    healthy('digits', 20, STEPS, ranks=2),
    healthy('digits', 21, {}, change=lambda d: replace(d, train=d.train[:1100])),
    healthy('digits', 22, COSINE, change=lambda d: replace(d, train=d.train[300:])),
    *(
        healthy('cifar10', i, options)
        for i, options in enumerate(
            [{}, {}, COSINE, {'train.label_smoothing': 0}, {'data.crop': 'none'}]
        )
    ),
    healthy('cifar10', 5, {}, ranks=2),
    healthy('cifar10', 6, {}, change=lambda d: replace(d, train=d.train[100:])),
]
CASES = {case.name: case for case in [*HEALTHY, *MISTAKES]}


def load_data(folder: Path, dataset: str) -> Dataset:
    """Return the unchanged data of a data set; pack them in a folder first, unless they exist."""
    if not (folder / MANIFEST_NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        whole = digits() if dataset == 'digits' else cifar10(None)
        part = (
            whole
            if dataset == 'digits'
            else replace(whole, train=whole.train[:NUM_TRAIN], validation=whole.train[-NUM_HELD:])
        )
        pack(part, folder)
    found = {}
    for split in ('train', 'validation'):
        records = RecordFile(folder / f'{split}.rec')
        found[split] = [
            Sample(int(r.label), f'{split}/{i}', r.image.tobytes())
            for i, r in enumerate(map(records.read, range(len(records))))
        ]
    return Dataset(dataset, str(folder), load_manifest(folder)['classes'], **found)


def prepare(case: Case, work: Path) -> dict[str, object]:
    """Pack the data of a run unless they exist; return the options that describe them."""
    folder = work / 'data' / (slug(case) if case.change else case.dataset)
    if not (folder / MANIFEST_NAME).exists():
        whole = load_data(work / 'data' / case.dataset, case.dataset)
        if case.change:
            folder.mkdir(parents=True, exist_ok=True)
            pack(case.change(whole), folder)
    splits = load_manifest(folder)['splits']
    return {
        'data.dir': folder,
        'data.num_train': splits['train']['num_images'],
        'data.num_val': splits['validation']['num_images'],
    }


def slug(case: Case) -> str:
    return ''.join(c if c.isalnum() else '_' for c in case.name)


def accuracy(run: Path) -> float | None:
    """Return the best Top-1 of a complete run, or None."""
    lines = read_metrics(run)
    top1 = [m['num_top1'] / m['num_images'] for m in lines if m.get('event') == 'eval']
    return max(top1, default=0.0) if lines[-1].get('event') == 'end' else None


def train(case: Case, work: Path) -> None:
    run, first = work / 'runs' / slug(case), work / 'runs' / f'healthy_{case.dataset}_0'
    if accuracy(run) is not None:
        return
    shutil.rmtree(run, ignore_errors=True)  # an incomplete run
    options = {
        **COMMON,
        **RECIPES[case.dataset],
        'run.seed': 1,
        **prepare(case, work),
        **case.options,
        'run.dir': run,
    }
    if run != first:
        options['run.reference'] = f'[{first}]'
    words = [
        'train',
        '--config',
        ROOT / f'launch/configs/{case.dataset}_cpu.yaml',
        *(word for key, value in options.items() for word in (f'--{key}', value)),
    ]
    if case.patch or case.ranks > 1:
        start = ['launch/ranks.sh', case.ranks] if case.ranks > 1 else []
        subprocess.run(
            [str(w) for w in (*start, PYTHON, __file__, '--run', case.name, *words)], cwd=ROOT
        )
    else:  # in this process, to import MXNet only once
        run_command([str(w) for w in words])


def named_causes(case: Case, work: Path) -> list[str]:
    """Return the causes that `why` names; a failed call counts as a cause of its own."""
    command = [
        PYTHON,
        '-m',
        'mlperf_rn50',
        'why',
        work / 'runs' / slug(case),
        '--probe',
        '--format',
        'json',
    ]
    done = subprocess.run([str(w) for w in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return [f'exit code {done.returncode}: {" ".join(done.stderr.split())[-60:]}']
    return [c['cause'] for c in json.loads(done.stdout)['accuracy']['causes']]


def show(case: Case, work: Path, is_asked: bool) -> list[str]:
    """Return the row of a run; accuracies in percent."""
    run = work / 'runs' / slug(case)
    reached = accuracy(run)
    named = named_causes(case, work) if is_asked and reached is not None else []
    target = float(str({**RECIPES[case.dataset], **case.options}['train.target_accuracy']))
    is_planted = reached is not None and (reached < target) == bool(
        case.causes and not case.is_better
    )
    fits = set(named) & set(case.causes) and len(named) <= MOST_NAMED if case.causes else not named
    state = (
        'not trained'
        if reached is None
        else 'unfit'
        if not is_planted
        else 'ok'
        if fits
        else 'wrong'
    )
    return [
        case.name,
        case.dataset,
        ' or '.join(case.causes) or 'none',
        f'{100 * (reached or 0):.1f}',
        f'{100 * target:.0f}',
        ', '.join(named) or 'none',
        state if is_asked or state[0] in 'nu' else 'trained',
    ]


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
    parser.add_argument(
        '--work', type=lambda p: Path(p).resolve(), default=ROOT / 'logs/why_accuracy'
    )
    parser.add_argument('--only-train', action='store_true', help='do not run `why`')
    parser.add_argument('--only-why', action='store_true', help='use only runs that exist')
    options = parser.parse_args()
    cases = [CASES[name] for name in options.names] or list(CASES.values())
    rows = []
    for case in cases:
        if not options.only_why:
            train(case, options.work)
        rows.append(show(case, options.work, not options.only_train))
        print('  '.join(rows[-1]), file=sys.stderr, flush=True)
    print(tabulate(rows, ('run', 'data', 'expected', 'Top-1', 'target', 'named', 'result')))
    if not options.only_train:
        planted, good = (
            [
                r[-1]
                for c, r in zip(cases, rows)
                if bool(c.causes) == kind and r[-1] != 'not trained'
            ]
            for kind in (True, False)
        )
        print(
            f'named: {planted.count("ok")} of {len(planted)} mistakes; accused: '
            f'{good.count("wrong")} of {len(good)} healthy runs; without effect or not healthy: '
            f'{(planted + good).count("unfit")}'
        )


if __name__ == '__main__':
    main()
