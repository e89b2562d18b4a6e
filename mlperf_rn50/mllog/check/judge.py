"""Checks of logs against the rules of the rounds, and facts in a log that no checker reports."""
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.check.official import NotInstalled, check_official, find_long_lines
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.read import reader
from mlperf_rn50.mllog.rulesets import DIVISIONS, RULESETS, V05
from mlperf_rn50.mllog.run import Run
from mlperf_rn50.runfolder.jsonl import number

_BY_FORMAT = {'MLPv0.5.0': RULESETS[:1], 'MLL': RULESETS[1:2], 'MLLOG': RULESETS[2:]}
_MAX_NAMED = 20  # maximum number of torn lines, and of long lines, listed for each log
# Keys that level 2 of the v0.5 rules requires.
_LEVEL2 = ('run_clear_caches', 'train_loop', 'train_epoch', 'opt_learning_rate', 'eval_start', 'eval_size',
           'eval_target', 'eval_accuracy', 'eval_stop', 'eval_offset', 'model_hp_initial_max_pool',
           'model_hp_begin_block', 'model_hp_end_block', 'model_hp_block_type', 'model_hp_projection_shortcut',
           'model_hp_shorcut_add', 'model_hp_resnet_topology')


@dataclass(frozen=True)
class RulesetResult:
    ruleset: str
    division: str
    violations: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass(frozen=True)
class CheckedLog:
    path: Path
    loaded: Run | UserError  # as read, or why no run can be read
    verdicts: tuple[RulesetResult, ...] = ()
    last_step_lr_factor: float | None = None  # as logged
    error: str | None = None  # why the log is unreadable

    @property
    def passed(self) -> bool:
        return self.error is None and all(v.passed for v in self.verdicts)


def check_v05(found: Sequence[LogEvent]) -> tuple[str, ...]:
    """Return how a log violates levels 1 and 2 of the v0.5 compliance rules, or misses the target that it declares."""
    logged = [e for e in found if e.line_format == 'MLPv0.5.0']
    if not logged:
        return ('no :::MLPv0.5.0 line',)
    counts, once = Counter(e.key for e in logged), ['run_start', 'run_stop', 'run_final']
    violations = [f'level 1: {key} appears {counts[key]} times, expected once' for key in once if counts[key] != 1]
    order = [e.key for e in logged if e.key in once]
    if not violations and order != once:
        violations.append(f'level 1: the order is {", ".join(order)}, expected {", ".join(once)}')
    if not counts['eval_start'] and not counts['eval_stop']:
        violations.append('level 1: eval_start and eval_stop are missing')
    evaluations = [(e.value, number(e.value.get('value') if isinstance(e.value, dict) else e.value, -1e300, 1e300))
                   for e in logged if e.key == 'eval_accuracy']
    for value, accuracy in evaluations:
        if not (isinstance(value, dict) and {'epoch', 'value'} <= set(value)) or accuracy is None:
            violations.append(f'level 1: eval_accuracy is {value!r}, expected {{"epoch": e, "value": v}}')
    violations += [f'level 2: {key} is missing' for key in _LEVEL2 if not counts[key]]
    best = max([a for _, a in evaluations if a is not None], default=None)
    target = next((e.value for e in logged if e.key == 'eval_target' and isinstance(e.value, (int, float))), None)
    if best is None:
        violations.append('level 1: eval_accuracy is missing')
    elif target is not None and best < target:
        violations.append(f'the target was missed: best accuracy {best:.5f}, expected at least {target}')
    return tuple(violations)


def _limited(texts: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the first messages and, if there are more, a message with the number of omitted messages."""
    return (*texts[:_MAX_NAMED], *([f'{name}: {len(texts) - _MAX_NAMED} more'] if len(texts) > _MAX_NAMED else []))


def check_log(path: Path, rulesets: Sequence[str] | None = None, division: str | None = None) -> CheckedLog:
    """Check a log against rulesets. By default, its line formats select the rulesets, and the log names the division.

    Raise UserError if the file is unreadable or has no log line, and NotInstalled if the official checker is missing.
    """
    lines = list(reader.read_events(path))
    found = [e for _, e in lines if isinstance(e, LogEvent)]
    long = _limited(find_long_lines(path), 'long lines')
    torn = _limited([f'torn line {n}: {e.args[0]}' for n, e in lines if isinstance(e, ValueError)], 'torn lines')
    if not found:
        reason = next(iter(long + torn), 'contains no MLPerf log line')
        raise UserError(f'{path}: {reason}; expected a result_<k>.txt')
    formats = {e.line_format for e in found}
    last = {e.key: e.value for e in found}
    logged_division = last.get(keys.SUBMISSION_DIVISION)
    if rulesets is None:
        rulesets = [r for name in _BY_FORMAT if name in formats for r in _BY_FORMAT[name]]
    try:
        loaded: Run | UserError = reader.read_run(path)
    except UserError as e:  # such as a second run
        loaded = e
    errors = loaded.errors if isinstance(loaded, Run) else (str(loaded).removeprefix(f'{path}: '),)
    verdicts, is_closed = [], (division or logged_division) == keys.CLOSED
    options = {k: v for e in found if e.key == events.OPEN_OPTIONS and isinstance(e.value, dict)  # of each resume too
               for k, v in e.value.items()}
    open_only = _limited([f'{key} is {value!r:.80}, which only the open division permits' for key, value in (
        options.items() if is_closed else ())], events.OPEN_OPTIONS)
    for ruleset in rulesets:
        violations = long + torn + open_only
        if ruleset == V05:
            violations += check_v05(found)
        elif not long:  # the official checker would parse long lines for minutes
            violations += check_official(path, ruleset, division)
        verdicts.append(RulesetResult(ruleset, division or (
            logged_division if logged_division in DIVISIONS else 'open'), violations + errors))
    return CheckedLog(path, loaded, tuple(verdicts), number(last.get(events.LAST_STEP_LR_FACTOR), 0, 1))


def check_logs(paths: Sequence[Path], rulesets: Sequence[str] | None, division: str | None) -> Iterator[CheckedLog]:
    """Check logs one by one. An unreadable log among several becomes a result with an error instead of an exception."""
    for path in paths:
        try:
            yield check_log(path, rulesets, division)
        except NotInstalled:
            raise
        except UserError as e:
            if len(paths) == 1:
                raise
            yield CheckedLog(path, e, error=str(e).removeprefix(f'{path}: '))


def logs_as_json(logs: Sequence[CheckedLog]) -> dict[str, Any]:
    """Return the verdicts as JSON with the keys of docs/results.md."""
    facts = ('dataset', 'is_imagenet', 'num_resumes')
    return {'passed': all(log.passed for log in logs),
            'logs': [{'file': str(log.path), 'passed': log.passed, 'error': log.error,
                      'best_top1': getattr(log.loaded, 'best_accuracy', None),
                      **{name: getattr(log.loaded, name, None) for name in facts},
                      'last_step_lr_factor': log.last_step_lr_factor,
                      'verdicts': [{**asdict(v), 'passed': v.passed} for v in log.verdicts]} for log in logs]}
