"""Causes of a missed accuracy that configuration, log and metrics.jsonl show, and the answer that
names them.

The limits apply only to runs that ended below their target or are behind their references, because
every recipe that converges is right.
"""

import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_rn50.analysis.recipe.differences import find_deviations
from mlperf_rn50.analysis.run_data import RunData, load_run, load_run_config
from mlperf_rn50.analysis.why.time_answer import make_explanation
from mlperf_rn50.analysis.why.unfinished import was_behind
from mlperf_rn50.answer import Answer, columns
from mlperf_rn50.config import Config, render_value
from mlperf_rn50.files import load_ini
from mlperf_rn50.runfolder.names import find_run_folders, list_runs
from mlperf_rn50.runfolder.records import CourseRecord, LossScaleRecord, TrainRecord
from mlperf_rn50.text import grouped, percent, significant

_TABLE = load_ini(Path(__file__).with_name('causes.ini'))
_KEYS, _COMMANDS = _TABLE['keys'], _TABLE['commands']
_NUM_ROWS = 30  # of the evidence
_MAX_REFERENCES = 20  # folders, and runs of each
_TOO_EASY = ('leak', 'classes_missing')  # with which a run may reach its target wrongly


class Cause(NamedTuple):
    """A figure that may be the cause of a missed accuracy.

    Args:
        strength: above 1 it is accused, the strongest first.
        verdict: usual (within the expected bounds), possible (beyond them) or too early (not to be
            judged yet).
        sentence: text that names the cause; by default the figure beside its bounds.
    """

    name: str
    strength: float
    figure: str
    measured: str
    expected: str
    verdict: str = 'usual'
    sentence: str = ''

    @property
    def text(self) -> str:
        return self.sentence or (
            f'{self.name.replace("_", " ")} ({self.figure}: {self.measured}, expected '
            f'{self.expected})'
        )


def weigh(
    name: str,
    figure: str,
    value: float,
    least: float = -math.inf,
    most: float = math.inf,
    strength: float | None = None,
) -> Cause:
    """Return a cause that is accused if the printed value is beyond its printed limits.

    The strength is by default the ratio of the value and the limit.
    """
    limits = {word: v for word, v in (('at least', least), ('at most', most)) if abs(v) < math.inf}
    # a share is never above 100 %
    render = percent if max(value, *limits.values()) <= 1 else significant
    low, got, high = (float(render(v).split()[0].replace(',', '')) for v in (least, value, most))
    is_usual = low <= got <= high
    ratio = max(value / most, least / max(value, 1e-9))
    if is_usual:
        strength = min(1.0, ratio)
    return Cause(
        name,
        ratio if strength is None else strength,
        figure,
        measured=render(value),
        expected=' and '.join(f'{word} {render(v)}' for word, v in limits.items()),
        verdict='usual' if is_usual else 'possible',
    )


def _judge_schedule(
    run: RunData, config: Config, rates: Sequence[tuple[float, float]], peak: float
) -> Iterator[Cause]:
    """Yield the figures of warm-up and decay, given the epochs and learning rates of steps."""
    s, num_epochs = config.schedule, config.num_epochs
    warmup = s.warmup_epochs / max(num_epochs, s.decay_epochs)
    yield weigh('warmup', 'part of the epochs', warmup, most=0.5)
    # the last steps may not be recorded
    trained = max(rates[-1][0] if rates else 0.0, (run.log and run.log.last_epoch) or 0)
    if rates and trained > num_epochs - 1:
        after = [r / peak for e, r in rates if e > s.warmup_epochs] or [1.0]
        # In the shipped schedules, up to a third of the steps are below 5 %, as with step decay at
        # 30, 60 and 80 of 90.
        yield weigh(
            'decay',
            'part of the run with less than 5 % of the largest learning rate',
            sum(r < 0.05 for r in after) / len(after),
            most=0.5,
        )
        is_cut = s.decay_epochs > num_epochs
        found = weigh(
            'epochs' if is_cut else 'decay',
            'last learning rate relative to the largest',
            after[-1],
            most=0.25,
            strength=10.0 if is_cut else None,
        )
        if is_cut:
            text = f'it trained {num_epochs} of the {s.decay_epochs:g} epochs of its schedule'
            found = found._replace(sentence=text)
        yield found
    elif rates and run.log and run.log.status == 'aborted' and not was_behind(run, config):
        yield weigh('epochs', 'part of the planned epochs', trained / num_epochs, least=0.9)


def judge_course(run: RunData, config: Config, batch: int, num_ranks: int) -> Iterator[Cause]:
    """Yield the figures of a run's recipe and course."""
    d, o, t = config.data, config.optimizer, config.train
    records = run.all(TrainRecord)
    num_epochs, per_epoch = config.num_epochs, -(-d.num_train // batch)
    num_steps = num_epochs * per_epoch

    # The learning rate of the run. The reported steps may miss its peak.
    # A partly filled last step applies a smaller one than the schedule's.
    scheduled = ((r.epoch, r.scheduled_learning_rate or r.learning_rate) for r in records)
    rates = [(epoch, rate) for epoch, rate in scheduled if rate is not None]
    peak = max([config.schedule.base_lr, *(rate for _, rate in rates)])
    if o.name == 'sgd':  # 3/8 of the lowest (digits), twice the highest (CIFAR-10) shipped rate
        rate = peak * 256 / batch * 0.1 / (1 - o.momentum)
        yield weigh('learning_rate', 'per 256 images at momentum 0.9', rate, 0.03, 1.6)
        # Five times the largest shipped one, for CIFAR-10.
        shrink = peak * o.weight_decay / (1 - o.momentum)
        yield weigh('weight_decay', 'part of the weights that a step removes', shrink, most=0.01)

    # Its losses.
    losses = [(r.epoch, r.loss) for r in records if r.loss is not None]
    relative = [v / math.log(d.num_classes) for e, v in losses if e >= num_epochs / 10] or [0.0]
    figure = 'largest loss after a tenth of the epochs, relative to equal logits'
    for name in ('learning_rate', 'gradient_scale'):
        yield weigh(name, figure, max(relative), most=2)
    last = statistics.median(relative[-len(relative) // 4 :])
    figure = 'loss in the last quarter, relative to equal logits'
    yield weigh('gradient_scale', figure, last, most=0.95)
    yield from _judge_schedule(run, config, rates, peak)

    # Numbers of steps, epochs and images. Digits, the easiest data set, needs 70 steps. No shipped
    # recipe needs 2 epochs.
    is_large = per_epoch < num_epochs
    name = 'batch' if is_large else 'epochs'
    yield weigh(name, f'steps with batch {batch}', num_steps, least=100)
    if not is_large:
        yield weigh('epochs', 'number', num_epochs, least=3)
    local = batch // num_ranks // t.gradient_accumulation_steps
    yield weigh('batch', 'images per rank for statistics of BatchNorm', local, least=8)
    padding = per_epoch * batch / d.num_train - 1
    yield weigh('batch', 'padding of an epoch relative to its images', padding, most=0.25)

    # Averages, labels and crops.
    memory = 1 / (1 - config.model.bn_momentum) / num_steps
    figure = 'steps over which {} are averaged, relative to all'
    yield weigh('batch_norm', figure.format('statistics'), memory, most=0.25)
    averaged = 1 / (1 - (t.ema or 0)) / num_steps
    yield weigh('averaging', figure.format('weights'), averaged, most=1.0)
    figure = 'part of the probability for other classes'
    yield weigh('label_smoothing', figure, t.label_smoothing, most=0.4)
    # 1.14 in recipes for ImageNet, 1 in those for small images
    zoom = d.resize_shorter / (d.eval_size or d.image_size)
    yield weigh('crop', 'side of an image relative to its evaluated part', zoom, most=1.3)
    if d.crop == 'random_resized':
        figure = 'area of the largest training crop relative to the image'
        yield weigh('crop_area', figure, d.max_area, least=0.5)
    num_skipped = sum(r.now < r.before for r in run.all(LossScaleRecord))
    figure = 'steps that overflowed and were skipped'
    yield weigh('loss_scale', figure, num_skipped, most=10 + num_steps // 100)


def judge_recipe(config: Config, num_ranks: int, others: list[Config]) -> Iterator[Cause]:
    """Yield differences from the published recipes on ImageNet, and from the configurations of
    better runs."""
    for line in find_deviations(config, num_ranks):
        if ' have ' not in line:
            continue  # no published recipe has a similar batch
        key, _, text = line.partition(': got ')
        measured, _, published = text.partition('; ')
        yield Cause(_KEYS.get(key, 'batch'), 3.0, key, measured, published.rpartition(' have ')[2])
    for key, name in _KEYS.items():
        value_of = attrgetter(key)
        got = value_of(config)
        values = [v for c in others if _has_effect(key, c) and (v := value_of(c)) is not None]
        if got in (None, *values) or not values or not _has_effect(key, config):
            continue  # null: other keys determine it
        is_momentum = key.endswith('momentum')
        # Numbers may differ by a quarter, also the weight of a new value in an average.
        ratio = min(_factor(1 - got, 1 - v) if is_momentum else _factor(got, v) for v in values)
        expected = ' or '.join(dict.fromkeys(map(render_value, values)))
        near = ' within a factor of 1.25,' if isinstance(got, float) else ''
        text = f'{expected}{near} as in reference runs'
        yield Cause(name, ratio / 1.25, key, render_value(got), text)


def _has_effect(key: str, config: Config) -> bool:
    """Return whether the training depends on a key. A dynamic loss scale soon leaves its start."""
    match key:
        case 'train.loss_scale':
            train = config.train
            return train.precision == 'float16' and train.loss_scale_policy == 'static'
        case 'schedule.step_epochs' | 'schedule.step_factor':
            return config.schedule.decay == 'step'
        case 'schedule.poly_power':
            return config.schedule.decay == 'poly'
        case 'schedule.decay_epochs':  # with steps it only ends a run
            return config.schedule.decay != 'step' or config.train.max_epochs is None
        case 'data.min_area' | 'data.max_area':
            return config.data.crop == 'random_resized'
    return True


def _factor(a: Any, b: Any) -> float:
    """Return the ratio of the larger of two values to the smaller; 2 unless both are
    positive numbers."""
    if isinstance(b, (int, float)) and min(a, b) > 0:
        return max(a / b, b / a)
    return 2.0


def _reference_run(folder: Path) -> RunData | None:
    """Return the first converged run of a folder or, without one, its first run."""
    runs = [load_run(run) for run in list_runs(folder)[:_MAX_REFERENCES]]
    converged = (run for run in runs if run.log and run.log.status == 'converged')
    return next(converged, runs[0] if runs else None)


def find_better(run: RunData, config: Config) -> tuple[list[Config], str]:
    """Return the configurations of the reference runs if this run is below their accuracy,
    otherwise a sentence.

    Without an alarm, it is below if chance does not explain the difference on the validation
    images.
    """
    paths = map(Path, config.run.reference)
    folders = [f for path in paths for f in find_run_folders(path)[:_MAX_REFERENCES]]
    others = [other for f in folders if (other := _reference_run(f))]
    tops = [o.log.best_accuracy for o in others if o.log and o.log.best_accuracy is not None]
    own = (run.log and run.log.best_accuracy) or 0.0
    standing = run.last(CourseRecord)
    mean = statistics.fmean(tops or [1.0])
    least = max(0.0, mean - 3 * (2 * mean * (1 - mean) / config.data.num_val) ** 0.5)
    if tops and own >= least and not (standing and standing.behind):
        expected = f'at least {percent(least)} expected'
        return [], f'Not below its reference runs: Top-1 {percent(own)}, {expected}.'
    return [o.config for o in others if o.config], ''


def _next_step(cause: Cause, config: Config) -> str:
    name = cause.name
    if name == 'batch':
        return f'change {config.batch_key}'
    if name == 'epochs' and config.schedule.decay_epochs <= config.num_epochs:
        # After the end of its schedule, the learning rate is too small for further epochs.
        decay = 'step_epochs' if config.schedule.decay == 'step' else 'decay_epochs'
        last = 'train.max_epochs' if config.train.max_epochs else 'schedule.decay_epochs'
        return f'change {" and ".join(dict.fromkeys((f"schedule.{decay}", last)))}'
    if cause.figure in _KEYS:
        return f'change {cause.figure}'
    for key, of in _KEYS.items():
        if of == name:
            return f'change {key}'
    return _COMMANDS.get(name, 'pack corrected images with mlperf-rn50 prepare')


def _causes_text(named: Sequence[Cause]) -> str:
    """Return the causes; a figure that shows two of them is printed once."""
    figures = grouped(named, lambda c: c[2:5]).values()
    return ' or '.join(
        first._replace(name='_or_'.join(c.name for c in (first, *rest))).text
        for first, *rest in figures
    )


def _row(cause: Cause, named: Sequence[Cause]) -> tuple[str, ...]:
    """Return a row of the evidence."""
    verdict = 'possible' if cause.strength > 1 else cause.verdict
    if cause in named:
        verdict = 'cause'
    return cause.name, cause.figure, cause.measured, cause.expected, verdict


def explain_accuracy(
    run: RunData, probed: list[Cause] | None = None, weights: str = ''
) -> Answer | None:
    """Explain a run that ended below its target or is behind its references, or any run with the
    figures of a probe.

    At most two causes are named. Return None for a run that needs no explanation, or lacks its log
    or configuration.

    Args:
        probed: figures of a probe.
        weights: sentence that names the weights that were probed.
    """
    run = run.preserved()
    config, log, standing = run.config, run.log, run.last(CourseRecord)
    if not config or not log or not log.global_batch_size:
        return None
    is_below = log.status != 'converged'
    is_behind = bool(standing and standing.behind)
    target = math.inf if log.target_accuracy is None else log.target_accuracy
    has_reached = (log.best_accuracy or 0.0) >= target  # and may have failed afterwards
    has_ended = log.status in ('aborted', 'failed')
    has_missed = not has_reached and (has_ended or is_behind and is_below)
    if probed is None and not (has_missed and log.evaluations):
        return None

    # All figures, the strongest first.
    found = list(probed or ())
    notes = [standing.text if standing else '', weights]
    if has_missed:
        better, not_below = find_better(run, config)
        notes.append(not_below)
        # an elastic run scales the learning rate for the ranks that were configured at its start
        begun = load_run_config(run.folder, ()) or config
        found += judge_recipe(config, begun.world_size or log.num_ranks or 1, better)
        found += judge_course(run, config, log.global_batch_size, log.num_ranks or 1)
    found.sort(
        key=lambda c: (-c.strength if c.strength > 1 else 0, c.verdict == 'usual', -c.strength)
    )

    # The strongest figures of two names are causes.
    accused = [c for c in found if c.strength > 1 and (is_below or c.name in _TOO_EASY)]
    named = [first for first, *_ in grouped(accused, lambda c: c.name).values()][:2]
    if named:
        shown = _causes_text(named)
        next_step = ', or '.join(dict.fromkeys(_next_step(c, config) for c in named))
    else:
        shown = (
            f'{"log and configuration" if probed is None else "weights and images"} show no cause'
        )
        if any(c.verdict == 'too early' for c in found):
            shown += ', some because it is too early'
        command = shlex.join(['mlperf-rn50', 'why', str(run.folder.result), '--probe'])
        next_step = command if probed is None else ''
    top1 = percent(log.best_accuracy or 0.0)
    return make_explanation(
        f'Top-1 {top1}, target {percent(log.target_accuracy or 0.0)}: {shown}.',
        columns('cause | figure | measured | expected | verdict'),
        [_row(c, named) for c in found[:_NUM_ROWS]],
        next_step=next_step,
        notes=[note for note in notes if note],
        causes=[{'cause': c.name, 'text': c.text} for c in named],
    )
