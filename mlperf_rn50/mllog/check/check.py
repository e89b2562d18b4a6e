"""What each ruleset says of a log, and what the log says of itself."""
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import walk
from mlperf_rn50.mllog import events
from mlperf_rn50.mllog.check.official import NotInstalled, check_official, find_long_lines
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.read.raw_log import number
from mlperf_rn50.mllog.read.reader import read_events
from mlperf_rn50.mllog.rulesets import DIVISIONS, RULESETS, V05

_MAX_TORN = 20  # torn or long lines that are named
# Keys of level 2 of the rules of v0.5.
_LEVEL2 = ('run_clear_caches', 'train_loop', 'train_epoch', 'opt_learning_rate', 'eval_start', 'eval_size',
           'eval_target', 'eval_accuracy', 'eval_stop', 'eval_offset', 'model_hp_initial_max_pool',
           'model_hp_begin_block', 'model_hp_end_block', 'model_hp_block_type', 'model_hp_projection_shortcut',
           'model_hp_shorcut_add', 'model_hp_resnet_topology')


@dataclass(frozen=True)
class RulesetResult:
    """What one ruleset says of one log."""

    ruleset: str
    division: str
    violations: tuple[str, ...]  # a sentence each

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass(frozen=True)
class LogFacts:
    """What a log says of itself that no checker looks at; None where it does not."""

    formats: frozenset[str]
    division: str | None
    dataset: str | None
    is_imagenet: bool  # so are published logs without a data set
    num_resumes: int
    best_top1: float | None
    torn: tuple[str, ...]  # what starts like a log line and is none, as 'line N: why', and how many more
    long: tuple[str, ...]  # lines that are too long for a log line, a sentence each, likewise

    @property
    def applicable_rulesets(self) -> tuple[str, ...]:
        """The rulesets whose line format the log holds."""
        rulesets = {'MLPv0.5.0': RULESETS[:1], 'MLL': RULESETS[1:2], 'MLLOG': RULESETS[2:]}
        return tuple(r for line_format, its in rulesets.items() if line_format in self.formats for r in its)


@dataclass(frozen=True)
class CheckedLog:
    """What there is to say of one log."""

    path: Path
    facts: LogFacts | None = None  # None where it cannot be read
    verdicts: tuple[RulesetResult, ...] = ()
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.facts is not None and all(v.passed for v in self.verdicts)

    @property
    def claims(self) -> tuple[str, ...]:
        """The rulesets and divisions that it passes."""
        return tuple(f'{v.ruleset} {v.division}' for v in self.verdicts if v.passed)


def accuracy_of(event: LogEvent) -> float | None:
    """The accuracy that an eval_accuracy names; None where it is no number."""
    value = number(event.value.get('value') if isinstance(event.value, dict) else event.value, -1e300, 1e300)
    return None if value is None else float(value)


def check_v05(path: Path) -> tuple[str, ...]:
    """Violations of the v0.5 rules, levels 1 and 2, and of its quality target.

    Source: MLPerf training v0.5 compliance rules.
    """
    found = [e for _, e in read_events(path) if isinstance(e, LogEvent) and e.line_format == 'MLPv0.5.0']
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
    evaluations = [(e.value, accuracy_of(e)) for e in found if e.key == 'eval_accuracy']
    for value, accuracy in evaluations:
        if not (isinstance(value, dict) and {'epoch', 'value'} <= set(value)) or accuracy is None:
            violations.append(f'level 1: eval_accuracy is {value!r}, expected {{"epoch": e, "value": v}}')
    violations += [f'level 2: {key} is missing' for key in _LEVEL2 if not counts[key]]
    best = max([a for _, a in evaluations if a is not None], default=None)
    target = next((e.value for e in found if e.key == 'eval_target' and isinstance(e.value, (int, float))), None)
    if best is None:
        violations.append('level 1: eval_accuracy is missing')
    elif target is not None and best < target:
        violations.append(f'the target was missed: best accuracy {best:.5f}, expected at least {target}')
    return tuple(violations)


def find_facts(path: Path) -> LogFacts:
    """The facts of a log file."""
    formats, torn, accuracies = set(), [], []
    division, dataset, is_imagenet, num_resumes = None, None, True, 0
    for line, event in read_events(path):
        if isinstance(event, ValueError):
            torn.append(f'line {line}: {event}')
            continue
        formats.add(event.line_format)
        if event.key == 'submission_division' and event.value in DIVISIONS:
            division = event.value
        elif event.key == events.DATASET:
            dataset, is_imagenet = str(event.value), event.metadata.get('is_imagenet') is True
        elif event.key == events.RUN_RESUMED:
            num_resumes += 1
        elif event.key == 'eval_accuracy':
            accuracies.append(accuracy_of(event))
    known = [a for a in accuracies if a is not None]
    return LogFacts(frozenset(formats), division, dataset, is_imagenet, num_resumes, max(known, default=None),
                    _first(torn), _first(find_long_lines(path)))


def _first(texts: Sequence[str]) -> tuple[str, ...]:
    """The first of many sentences, and how many more there are."""
    more = len(texts) - _MAX_TORN
    return (*texts[:_MAX_TORN], *([f'and {more} more of them'] if more > 0 else []))


def _check_ruleset(path: Path, facts: LogFacts, ruleset: str, division: str | None) -> RulesetResult:
    """What one ruleset says; the official checker is given no long line."""
    violations = facts.long + tuple(f'torn line, {t}' for t in facts.torn)
    if ruleset == V05:
        violations += check_v05(path)
    elif not facts.long:
        violations += check_official(path, ruleset, division)
    return RulesetResult(ruleset, division or facts.division or 'open', violations)


def check_log(path: Path, rulesets: Sequence[str] | None = None, division: str | None = None) -> CheckedLog:
    """Return what each ruleset says of a log.

    Args:
        rulesets: of RULESETS; None for every one whose lines the log holds.
        division: check as if this one had been logged; None takes the logged one.

    Raises:
        UserError: the file cannot be read or holds no log line at all.
        NotInstalled: a ruleset takes the official checker, which is not there.
    """
    facts = find_facts(path)
    if not facts.formats:
        why = facts.long[0] if facts.long else 'no MLPerf log line in it'
        raise UserError(f'{path}: {why}; expected a result_<k>.txt')
    asked = facts.applicable_rulesets if rulesets is None else rulesets
    return CheckedLog(path, facts, tuple(_check_ruleset(path, facts, r, division) for r in asked))


def _walk(folder: Path) -> list[Path]:
    """The results in a folder and below it, and the folders there that cannot be read."""
    found: list[Path] = []
    refused: list[Path] = []
    for place, _, names in walk(folder, lambda e: refused.append(Path(e.filename))):
        found += sorted((Path(place, n) for n in names if re.fullmatch(r'result_.*\.txt', n)),
                        key=lambda p: (len(p.name), p.name))
    return found + refused


def find_logs(paths: Sequence[Path]) -> list[Path]:
    """The files that are named, and every result_*.txt in or below a folder that is; UserError where it has none."""
    found: dict[Path, None] = {}
    for path in paths:
        logs = _walk(path) if path.is_dir() else [path]
        if not logs:
            raise UserError(f'{path}: no result_<k>.txt in it or below it; expected a log or a folder of logs')
        found.update(dict.fromkeys(logs))
    return list(found)


def check_logs(paths: Sequence[Path], rulesets: Sequence[str] | None, division: str | None) -> Iterator[CheckedLog]:
    """The same for several logs; one of many that cannot be read does not end the others, which NotInstalled does."""
    for path in paths:
        try:
            yield check_log(path, rulesets, division)
        except NotInstalled:
            raise
        except UserError as e:
            if len(paths) == 1:
                raise
            yield CheckedLog(path, error=str(e).removeprefix(f'{path}: '))


def render_log(log: CheckedLog) -> str:
    """Verdicts as text, and what the log can claim."""
    lines = [str(log.path)]
    if log.facts is None:
        return '\n'.join(map(events.printable, [*lines, f'  FAIL: {log.error}']))
    for v in log.verdicts:
        level = ', levels 1 and 2' if v.ruleset == V05 else ''
        lines.append(f'  {v.ruleset:6s} {v.division:6s} {"pass" + level if v.passed else "FAIL"}')
        lines += [f'         - {text}' for text in v.violations]
    lines.append(f'  can claim: {", ".join(log.claims) or "nothing"}')
    if not log.facts.is_imagenet:
        lines.append(f'  but: the data set is {log.facts.dataset}, not ImageNet: this is a check of the format only, '
                     'not a result that can be submitted')
    if log.facts.num_resumes:
        lines.append(f'  but: the run was resumed {log.facts.num_resumes} times; a log that spans a resume '
                     'cannot be submitted')
    return '\n'.join(map(events.printable, lines))


def count_verdicts(logs: Sequence[CheckedLog]) -> dict[str, tuple[int, int]]:
    """How many logs pass and fail each ruleset that was asked of one."""
    counts = Counter((v.ruleset, v.passed) for log in logs for v in log.verdicts)
    return {r: (counts[r, True], counts[r, False]) for r in RULESETS if counts[r, True] or counts[r, False]}


def render_sum(logs: Sequence[CheckedLog]) -> str:
    """How many of several logs pass each ruleset, a line each."""
    unread = sum(log.facts is None for log in logs)
    lines = [f'{len(logs)} logs' + (f', {unread} of them cannot be read' if unread else '')]
    for ruleset, (passed, failed) in count_verdicts(logs).items():
        counts = [f'{passed} pass'] * (passed > 0) + [f'{failed} {"fails" if failed == 1 else "fail"}'] * (failed > 0)
        lines.append(f'  {ruleset:6s} {", ".join(counts)}')
    return '\n'.join(lines)


def logs_as_json(logs: Sequence[CheckedLog]) -> dict[str, Any]:
    """The same for programs; the keys are those of docs/results.md."""
    return {'passed': all(log.passed for log in logs),
            'logs': [{'file': str(log.path), 'passed': log.passed, 'error': log.error, 'can_claim': log.claims,
                      **{name: getattr(log.facts, name, None)
                         for name in ('best_top1', 'dataset', 'is_imagenet', 'num_resumes')},
                      'verdicts': [{'ruleset': v.ruleset, 'division': v.division, 'passed': v.passed,
                                    'violations': v.violations} for v in log.verdicts]} for log in logs],
            'sum': {'num_logs': len(logs), 'num_unreadable': sum(log.facts is None for log in logs),
                    'rulesets': {r: {'num_passed': passed, 'num_failed': failed}
                                 for r, (passed, failed) in count_verdicts(logs).items()}}}
