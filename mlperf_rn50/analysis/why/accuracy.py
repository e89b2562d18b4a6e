"""Causes of a missed accuracy that configuration, log and metrics.jsonl show, and the answer that names them.

The limits apply only to runs that ended below their target or are behind their references, because every recipe that
converges is right.
"""
import math
import statistics
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from mlperf_rn50.analysis.recipe.differences import find_deviations
from mlperf_rn50.analysis.why.answer import Answer
from mlperf_rn50.analysis.why.load import WhyRun, load_run
from mlperf_rn50.config import Config, render_value
from mlperf_rn50.runfolder.names import RunFolder, find_run_folders, run_numbers
from mlperf_rn50.runfolder.records import CourseRecord, LossScaleRecord, TrainRecord
from mlperf_rn50.text import percent

# What a key may cause, and the first key to change for a cause.
_KEYS = {'schedule.base_lr': 'learning_rate', 'optimizer.momentum': 'learning_rate', 'schedule.warmup_epochs': 'warmup',
         'schedule.decay_epochs': 'decay', 'schedule.decay': 'decay', 'schedule.step_epochs': 'decay',
         'optimizer.weight_decay': 'weight_decay', 'train.global_batch_size': 'batch', 'train.max_epochs': 'epochs',
         'data.crop': 'augmentation', 'data.min_area': 'augmentation', 'data.resize_shorter': 'crop',
         'data.mean': 'normalisation', 'data.std': 'normalisation', 'model.bn_momentum': 'batch_norm',
         'train.loss_scale': 'loss_scale', 'data.shuffle': 'shuffle', 'train.label_smoothing': 'label_smoothing'}
_COMMANDS = {'overfitting': 'change data.crop', **dict.fromkeys(
    ('frozen', 'gradient_scale', 'equal_shards', 'evaluation'), 'look for changes of the program with git diff')}
_NUM_ROWS = 30  # of the evidence
_TOO_EASY = ('leak', 'classes_missing')  # with which a run may reach its target wrongly


class Cause(NamedTuple):
    """A figure that may be the cause of a missed accuracy; strength: above 1 it is accused, the strongest first."""

    name: str
    strength: float
    figure: str
    measured: str
    expected: str

    @property
    def text(self) -> str:
        return f'{self.name.replace("_", " ")} ({self.figure}: {self.measured}, expected {self.expected})'


def weigh(name: str, figure: str, value: float, least: float = 0.0, most: float = math.inf) -> Cause:
    """Return a cause whose strength is the ratio of a value and the limit that it violates, if any."""
    limits = {word: v for word, v in (('at least', least), ('at most', most)) if 0 < v < math.inf}
    render = percent if max(limits.values()) <= 1 else '{:.3g}'.format  # the value is then a fraction
    return Cause(name, max(value / most, least / max(value, 1e-9)), figure, render(value),
                 ' and '.join(f'{word} {render(v)}' for word, v in limits.items()))


def judge_course(run: WhyRun, config: Config, batch: int, num_ranks: int) -> Iterator[Cause]:
    """Yield the figures of a run's recipe and course."""
    d, o, s, t = config.data, config.optimizer, config.schedule, config.train
    records = run.all(TrainRecord)
    rates = [(r.epoch, r.learning_rate) for r in records if r.learning_rate is not None]
    losses = [(r.epoch, r.loss) for r in records if r.loss is not None]
    num_epochs, per_epoch = t.max_epochs or max(1, int(s.decay_epochs)), -(-d.num_train // batch)
    num_steps, peak = num_epochs * per_epoch, max((r for _, r in rates), default=0.0) or s.base_lr

    if o.name == 'sgd':  # half the lowest (digits) and twice the highest (CIFAR-10) rate of the shipped recipes
        rate = peak * 256 / batch * 0.1 / (1 - o.momentum)
        yield weigh('learning_rate', 'per 256 images at momentum 0.9', rate, 0.04, 1.6)
        # Five times the largest shipped one, for CIFAR-10.
        shrink = peak * o.weight_decay / (1 - o.momentum)
        yield weigh('weight_decay', 'part of the weights that a step removes', shrink, most=0.01)
    relative = [v / math.log(d.num_classes) for e, v in losses if e >= num_epochs / 10] or [0.0]
    for name in ('learning_rate', 'gradient_scale'):
        yield weigh(name, 'largest loss after a tenth of the epochs, relative to equal logits', max(relative), most=2)
    last = statistics.median(relative[-len(relative) // 4:])
    yield weigh('gradient_scale', 'loss in the last quarter, relative to equal logits', last, most=0.95)
    yield weigh('warmup', 'part of the epochs', s.warmup_epochs / num_epochs, most=0.5)
    if rates and rates[-1][0] > num_epochs - 1:
        after = [r / peak for e, r in rates if e > s.warmup_epochs] or [0.0]
        # In the shipped schedules, up to a third of the steps are below 5 %, as with step decay at 30, 60 and 80 of 90.
        yield weigh('decay', 'part of the run with less than 5 % of the largest learning rate',
                    sum(r < 0.05 for r in after) / len(after), most=0.5)
        for name in ('epochs', 'decay') if s.decay_epochs > num_epochs else ('decay',):
            yield weigh(name, 'last learning rate relative to the largest', after[-1], most=0.25)
    elif rates and run.log and run.log.status in ('aborted', 'failed'):
        yield weigh('epochs', 'part of the planned epochs', rates[-1][0] / num_epochs, least=0.9)
    # Digits, the easiest data set, needs 70 steps. No shipped recipe needs 2 epochs.
    is_large, local = per_epoch < num_epochs, batch // num_ranks // t.gradient_accumulation_steps
    yield weigh('batch' if is_large else 'epochs', f'steps with batch {batch}', num_steps, least=100)
    if not is_large:
        yield weigh('epochs', 'number', num_epochs, least=3)
    yield weigh('batch', 'images per rank for statistics of BatchNorm', local, least=8)
    yield weigh('batch', 'padding of an epoch relative to its images', per_epoch * batch / d.num_train - 1, most=0.25)
    memory = 1 / (1 - config.model.bn_momentum) / num_steps
    yield weigh('batch_norm', 'part of the steps over which statistics are averaged', memory, most=0.25)
    zoom = d.resize_shorter / (d.eval_size or d.image_size)  # 1.14 in recipes for ImageNet, 1 in those for small images
    yield weigh('crop', 'side of an image relative to its evaluated part', zoom, most=1.3)
    num_skipped = sum(r.now < r.before for r in run.all(LossScaleRecord))
    yield weigh('loss_scale', 'steps that overflowed and were skipped', num_skipped, most=10 + num_steps // 100)


def judge_recipe(config: Config, num_ranks: int) -> Iterator[Cause]:
    """Yield differences from the published recipes on ImageNet, and from the runs in run.reference."""
    for line in find_deviations(config, num_ranks):
        key, _, text = line.partition(': got ')
        measured, _, published = text.partition('; ')
        yield Cause(_KEYS.get(key, 'batch'), 3.0, key, measured, published.rpartition(' have ')[2])
    folders = [f for path in config.run.reference for f in find_run_folders(Path(path))[:20]]
    others = [other for f in folders for k in run_numbers(f)[:1] if (other := load_run(RunFolder(f, k)).config)]
    for key, name in _KEYS.items() if others else ():
        got, values = attrgetter(key)(config), [v for v in map(attrgetter(key), others) if v is not None]
        if got in (None, *values) or not values:
            continue  # null: other keys determine it
        # Numbers may differ by a quarter, also the weight of a new value in an average. Unequal values that are no
        # positive numbers count as a factor of 2.
        a, *rest = [1 - v if key.endswith('momentum') else v for v in (got, *values)]
        ratio = min(max(a / b, b / a) if isinstance(b, (int, float)) and min(a, b) > 0 else 2.0 for b in rest)
        yield Cause(name, ratio / 1.25, f'{key}, in reference runs', render_value(got), render_value(values[0]))


def _next_step(cause: str) -> str:
    key = next((key for key, name in _KEYS.items() if name == cause), None)
    return f'change {key}' if key else _COMMANDS.get(cause, 'pack corrected images with mlperf-rn50 prepare')


def explain_accuracy(run: WhyRun, probed: list[Cause] | None = None) -> Answer | None:
    """Explain a run that ended below its target or is behind its references, or any run with the figures of a probe.

    At most two causes are named. Return None for a run that needs no explanation, or lacks its log or configuration.
    """
    config, log, standing = run.config, run.log, run.last(CourseRecord)
    if not config or not log or not log.global_batch_size:
        return None
    has_missed = log.status in ('aborted', 'failed') or bool(standing and standing.behind and log.status != 'converged')
    if not has_missed and probed is None:
        return None
    found = list(probed or ())
    if has_missed:
        found += judge_recipe(config, log.num_ranks or 1)
        found += judge_course(run, config, log.global_batch_size, log.num_ranks or 1)
    ordered = sorted(found, key=lambda c: -c.strength)
    accused = {c.name: c for c in reversed(ordered) if c.strength > 1 and (has_missed or c.name in _TOO_EASY)}
    named = sorted(accused.values(), key=lambda c: -c.strength)[:2]  # the strongest of two names
    verdicts = ['cause' if c in named else 'possible' if c.strength > 1 else 'usual' for c in ordered]
    where = 'log and configuration' if probed is None else 'weights and images'
    return Answer(
        f'Top-1 {percent(log.best_accuracy or 0.0)}, target {percent(log.target_accuracy or 0.0)}: '
        f'{" or ".join(c.text for c in named) or f"{where} show no cause"}.',
        ('cause', 'figure', 'measured', 'expected', 'verdict'),
        tuple((c.name, c.figure, c.measured, c.expected, v) for c, v in zip(ordered[:_NUM_ROWS], verdicts)),
        ', or '.join(dict.fromkeys(_next_step(c.name) for c in named)) if named else
        f'mlperf-rn50 why {run.folder.dir} --probe' * (probed is None),
        (standing.text,) if standing else (), {'causes': [{'cause': c.name, 'text': c.text} for c in named]})
