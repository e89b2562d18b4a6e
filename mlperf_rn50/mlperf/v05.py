"""The rules of v0.5, levels 1 and 2, whose checker is no longer published."""
from collections import Counter
from pathlib import Path

from mlperf_rn50.mlperf.events import Event
from mlperf_rn50.mlperf.reader import read_events

_LEVEL2 = ('run_clear_caches', 'train_loop', 'train_epoch', 'opt_learning_rate', 'eval_start', 'eval_size',
           'eval_target', 'eval_accuracy', 'eval_stop', 'eval_offset', 'model_hp_initial_max_pool',
           'model_hp_begin_block', 'model_hp_end_block', 'model_hp_block_type', 'model_hp_projection_shortcut',
           'model_hp_shorcut_add', 'model_hp_resnet_topology')


def accuracy_of(event: Event) -> float | None:
    """The accuracy that an eval_accuracy names; None where it is no number."""
    value = event.value.get('value') if isinstance(event.value, dict) else event.value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None  # neither NaN nor what is no float


def check_v05(path: Path) -> tuple[str, ...]:
    """Violations of the v0.5 rules, levels 1 and 2, and of its quality target.

    Source: MLPerf training v0.5 compliance rules.
    """
    found = [e for _, e in read_events(path) if isinstance(e, Event) and e.line_format == 'MLPv0.5.0']
    if not found:
        return ('there is no :::MLPv0.5.0 line',)
    violations = []
    counts = Counter(e.key for e in found)
    for key in ('run_start', 'run_stop', 'run_final'):
        if counts[key] != 1:
            violations.append(f'level 1: {key} stands {counts[key]} times, expected once')
    ends = [e.key for e in found if e.key in ('run_start', 'run_stop', 'run_final')]
    if not violations and ends != ['run_start', 'run_stop', 'run_final']:
        violations.append(f'level 1: the order is {", ".join(ends)}, expected run_start, run_stop, run_final')
    if not counts['eval_start'] and not counts['eval_stop']:
        violations.append('level 1: there is neither eval_start nor eval_stop')
    evaluations = [e for e in found if e.key == 'eval_accuracy']
    for e in evaluations:
        if not (isinstance(e.value, dict) and {'epoch', 'value'} <= set(e.value)) or accuracy_of(e) is None:
            violations.append(f'level 1: eval_accuracy is {e.value!r}, expected {{"epoch": e, "value": v}}')
    violations += [f'level 2: {key} is missing' for key in _LEVEL2 if not counts[key]]
    return tuple(violations + _target_missed(found, evaluations))


def _target_missed(found: list[Event], evaluations: list[Event]) -> list[str]:
    """The violation of a run that did not reach the target it logged."""
    targets = [e.value for e in found if e.key == 'eval_target' and isinstance(e.value, (int, float))]
    accuracies = [a for a in map(accuracy_of, evaluations) if a is not None]
    if not targets or not accuracies:
        return [] if accuracies else ['level 1: eval_accuracy is missing']
    if max(accuracies) < targets[0]:
        return [f'the target was missed: best accuracy {max(accuracies):.5f}, expected at least {targets[0]}']
    return []
