"""Checks of logs against the rules of the rounds, and facts in a log that no checker reports."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.check.official import check_official, find_long_lines
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.logged_run import TARGET, V05_TARGET, Run
from mlperf_rn50.mllog.read import reader
from mlperf_rn50.mllog.rulesets import DIVISIONS, ROUND_OF, RULESETS, V05
from mlperf_rn50.runfolder.jsonl import number

_BY_FORMAT = {'MLPv0.5.0': RULESETS[:1], 'MLL': RULESETS[1:2], 'MLLOG': RULESETS[2:]}
_MAX_NAMED = 20  # maximum number of torn lines, and of long lines, listed for each log
# Keys that level 2 of the v0.5 rules requires.
_LEVEL2 = (
    'run_clear_caches train_loop train_epoch opt_learning_rate '
    'eval_start eval_size eval_target eval_accuracy eval_stop eval_offset '
    'model_hp_initial_max_pool model_hp_begin_block model_hp_end_block model_hp_block_type '
    'model_hp_projection_shortcut model_hp_shorcut_add model_hp_resnet_topology'
).split()
_UNCHECKED_TARGETS = {V05: V05_TARGET, '0.6.0': TARGET}


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
    """A log, and what the rules of rounds find in it. A ruleset is applied when its result is first
    needed."""

    path: Path
    run: Run | None = None
    error: str | None = None  # why no run can be read
    rulesets: tuple[str, ...] = ()  # whose rules are to be applied
    division: str | None = None  # whose rules apply; None for the logged one
    logged_division: str | None = None
    # violations of all rulesets: damaged and long lines, options of the open division
    damage: tuple[str, ...] = ()
    has_long_lines: bool = False  # which the official checkers would parse for minutes
    v05: tuple[str, ...] = ()  # violations of the v0.5 rules
    last_step_lr_factor: float | None = None  # as logged
    # so far
    results: dict[str, RulesetResult] = field(default_factory=dict, compare=False, repr=False)

    def result(self, ruleset: str) -> RulesetResult:
        """Return the violations of a ruleset. Raise NotInstalled if its official checker is
        missing."""
        if ruleset not in self.results and self.run:
            if ruleset == V05:
                found = self.v05
            elif self.has_long_lines:
                found = ()
            else:
                found = check_official(self.path, ruleset, self.division)
            division = self.logged_division if self.logged_division in DIVISIONS else 'open'
            violations = self.damage + found + self._below_target(ruleset) + self.run.errors
            self.results[ruleset] = RulesetResult(ruleset, self.division or division, violations)
        return self.results[ruleset]

    def _below_target(self, ruleset: str) -> tuple[str, ...]:
        """Return the violation of a run on ImageNet that declares a target below that of v0.5 or
        v0.6, whose official rules do not check it."""
        run, target = self.run, _UNCHECKED_TARGETS.get(ruleset)
        is_open = (self.division or self.logged_division) == keys.OPEN
        if not run or not target or is_open or run.other_dataset or run.status != 'converged':
            return ()
        best = run.best_accuracy
        if best is None or best >= target:
            return ()
        return (
            f'the best accuracy is {best:.5f}, expected at least {target}, the target of '
            f'{ROUND_OF[ruleset]}',
        )

    @property
    def verdicts(self) -> tuple[RulesetResult, ...]:
        return tuple(map(self.result, self.rulesets))

    @property
    def passed(self) -> bool:
        return self.error is None and all(v.passed for v in self.verdicts)


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a set of logs. Every command that prints a verdict or a score uses it."""

    ruleset: str | None = None  # by whose rules the logs were judged; None if they were not
    # how the ruleset was chosen, unless it was given or is of the round in the name of a folder
    basis: str = ''
    is_sound: bool = True  # whether no violation holds in every round
    # whether rulesets were not applied because mlperf-logging is not installed
    is_unchecked: bool = False
    violations: tuple[str, ...] = ()  # broken rules, and contradictions
    obstacles: tuple[str, ...] = ()  # reasons why logs without violations cannot be submitted
    convergence: str = ''  # the violation that the runs took too few epochs, which may be bypassed
    # reasons why runs count as not converged, by log
    misses: Mapping[Path, str] = field(default_factory=dict)


def check_v05(found: Sequence[LogEvent]) -> tuple[str, ...]:
    """Return how a log violates levels 1 and 2 of the v0.5 compliance rules, or misses the target
    that it declares."""
    logged = [e for e in found if e.line_format == 'MLPv0.5.0']
    if not logged:
        return ('no :::MLPv0.5.0 line',)
    counts, once = Counter(e.key for e in logged), ['run_start', 'run_stop', 'run_final']
    violations = [
        f'level 1: {key} appears {counts[key]} times, expected once'
        for key in once
        if counts[key] != 1
    ]
    # the official checker sorts the lines
    places = sorted((e.time_s, *map(str, e.metadata.values()), e.key) for e in logged)
    order = [key for *_, key in places if key in once]
    if not violations and order != once:
        violations.append(f'level 1: the order is {", ".join(order)}, expected {", ".join(once)}')
    if not counts['eval_start'] and not counts['eval_stop']:
        violations.append('level 1: eval_start and eval_stop are missing')
    accuracies = []
    for value in (e.value for e in logged if e.key == 'eval_accuracy'):
        is_whole = isinstance(value, dict) and {'epoch', 'value'} <= set(value)
        accuracy = number(value.get('value') if isinstance(value, dict) else value, -1e300, 1e300)
        if not is_whole or accuracy is None:
            violations.append(
                f'level 1: eval_accuracy is {value!r}, expected {{"epoch": e, "value": v}}'
            )
        accuracies += [accuracy] if accuracy is not None else []
    violations += [f'level 2: {key} is missing' for key in _LEVEL2 if not counts[key]]
    if not accuracies:
        violations.append('level 1: eval_accuracy is missing')
    targets = [e.value for e in logged if e.key == 'eval_target']
    target = next((t for t in targets if isinstance(t, (int, float))), None)
    if accuracies and target is not None and (best := max(accuracies)) < target:
        violations.append(
            f'the target was missed: best accuracy {best:.5f}, expected at least {target}'
        )
    return tuple(violations)


def _limited(texts: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the first messages and, if there are more, a message with the number of omitted
    messages."""
    rest = [f'{name}: {len(texts) - _MAX_NAMED} more'] if len(texts) > _MAX_NAMED else []
    return (*texts[:_MAX_NAMED], *rest)


def check_log(
    path: Path,
    rulesets: Sequence[str] | None = None,
    division: str | None = None,
    now_s: float | None = None,
) -> CheckedLog:
    """Read a log at now_s, as read_run, that is to be checked against rulesets; None for those of
    its line formats.

    Raise UserError unless the log is of one ResNet run.
    """
    run, lines = reader.read_run(path, now_s), list(reader.read_events(path))
    found = [e for _, e in lines if isinstance(e, LogEvent)]
    last = {e.key: e.value for e in found}
    if rulesets is None:
        formats = {e.line_format for e in found}
        rulesets = [r for name in _BY_FORMAT if name in formats for r in _BY_FORMAT[name]]
    long = _limited(find_long_lines(path), 'long lines')
    torn = [f'torn line {n}: {e.args[0]}' for n, e in lines if isinstance(e, ValueError)]

    # Options of the open division, which each resume logs again.
    logged_division = last.get(keys.SUBMISSION_DIVISION)
    options: dict[str, Any] = {}
    for e in found:
        if e.key == events.OPEN_OPTIONS and isinstance(e.value, dict):
            options |= e.value
    open_only = [
        f'{key} is {value!r:.80}, which only the open division permits'
        for key, value in options.items()
        if (division or logged_division) == keys.CLOSED
    ]
    return CheckedLog(
        path,
        run,
        rulesets=tuple(rulesets),
        division=division,
        logged_division=logged_division,
        damage=long + _limited(torn, 'torn lines') + _limited(open_only, events.OPEN_OPTIONS),
        has_long_lines=bool(long),
        v05=check_v05(found) if V05 in rulesets else (),
        last_step_lr_factor=number(last.get(events.LAST_STEP_LR_FACTOR), 0, 1),
    )


def logs_as_json(logs: Sequence[CheckedLog]) -> dict[str, Any]:
    """Return the verdicts as JSON with the keys of docs/output.md."""
    facts = ('dataset', 'is_imagenet', 'num_resumes')
    return {
        'passed': all(log.passed for log in logs),
        'logs': [
            {
                'file': str(log.path),
                'passed': log.passed,
                'error': log.error,
                'best_top1': getattr(log.run, 'best_accuracy', None),
                **{name: getattr(log.run, name, None) for name in facts},
                'last_step_lr_factor': log.last_step_lr_factor,
                'verdicts': [{**asdict(v), 'passed': v.passed} for v in log.verdicts],
            }
            for log in logs
        ],
    }
