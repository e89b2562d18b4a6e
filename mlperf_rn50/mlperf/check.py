"""What each ruleset says of a log, and what the log says of itself."""
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import walk
from mlperf_rn50.mlperf import events
from mlperf_rn50.mlperf.official import NotInstalled, check_official, find_long_lines
from mlperf_rn50.mlperf.reader import read_events
from mlperf_rn50.mlperf.rulesets import DIVISIONS, RULESETS, V05
from mlperf_rn50.mlperf.v05 import accuracy_of, check_v05

_MAX_TORN = 20  # torn or long lines that are named


@dataclass(frozen=True)
class Verdict:
    """What one ruleset says of one log.

    Args:
        division: open or closed.
        violations: one sentence each; none where the log passes.
    """

    ruleset: str
    division: str
    violations: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass(frozen=True)
class LogFacts:
    """What a log says of itself that no checker looks at.

    Args:
        division: logged, None where it is not.
        dataset: logged data set, None where it is not.
        is_imagenet: whether it is; published logs without a data set count as ImageNet.
        best_top1: best accuracy logged, None without an evaluation.
        torn: lines that start like a log line and are none, as 'line N: why'; the first of many, and how many more.
        long: lines that are too long for a log line, a sentence each, likewise.
    """

    formats: frozenset[str]
    division: str | None
    dataset: str | None
    is_imagenet: bool
    num_resumes: int
    best_top1: float | None
    torn: tuple[str, ...]
    long: tuple[str, ...] = ()

    @property
    def applicable_rulesets(self) -> tuple[str, ...]:
        """The rulesets whose line format the log holds."""
        result: list[str] = []
        if 'MLPv0.5.0' in self.formats:
            result.append(V05)
        if 'MLL' in self.formats:
            result.append('0.6.0')
        if 'MLLOG' in self.formats:
            result += RULESETS[2:]
        return tuple(result)


@dataclass(frozen=True)
class CheckedLog:
    """What there is to say of one log.

    Args:
        facts: what it says of itself; None where it cannot be read.
        verdicts: of the rulesets that were asked for.
    """

    path: Path
    facts: LogFacts | None = None
    verdicts: tuple[Verdict, ...] = ()
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.facts is not None and all(v.passed for v in self.verdicts)

    @property
    def claims(self) -> tuple[str, ...]:
        """The rulesets and divisions that it passes."""
        return tuple(f'{v.ruleset} {v.division}' for v in self.verdicts if v.passed)


def find_facts(path: Path) -> LogFacts:
    """The facts of a log file.

    Raises:
        UserError: the file cannot be read.
    """
    formats, torn, accuracies = set(), [], []
    division, dataset, is_imagenet, num_resumes = None, None, True, 0
    for number, event in read_events(path):
        if isinstance(event, ValueError):
            torn.append(f'line {number}: {event}')
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


def _check_ruleset(path: Path, facts: LogFacts, ruleset: str, division: str | None) -> Verdict:
    """What one ruleset says; the official checker is given no long line."""
    violations = facts.long + tuple(f'torn line, {t}' for t in facts.torn)
    if ruleset == V05:
        violations += check_v05(path)
    elif not facts.long:
        violations += check_official(path, ruleset, division)
    return Verdict(ruleset, division or facts.division or 'open', violations)


def check_log(path: Path, rulesets: Sequence[str] | None = None, division: str | None = None) -> CheckedLog:
    """What each ruleset says of a log, as the logged division or another.

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
    """The files that are named, and every result_*.txt in or below a folder that is.

    Raises:
        UserError: a folder holds none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        logs = _walk(path) if path.is_dir() else [path]
        if not logs:
            raise UserError(f'{path}: no result_<k>.txt in it or below it; expected a log or a folder of logs')
        found.update(dict.fromkeys(logs))
    return list(found)


def check_logs(paths: Sequence[Path], rulesets: Sequence[str] | None, division: str | None) -> Iterator[CheckedLog]:
    """The same for several logs; one of many that cannot be read does not end the others.

    Raises:
        UserError: there is one log, and it cannot be read.
        NotInstalled: see check_log.
    """
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
            'logs': [_as_json(log) for log in logs],
            'sum': {'num_logs': len(logs), 'num_unreadable': sum(log.facts is None for log in logs),
                    'rulesets': {r: {'num_passed': passed, 'num_failed': failed}
                                 for r, (passed, failed) in count_verdicts(logs).items()}}}


def _as_json(log: CheckedLog) -> dict[str, Any]:
    facts = log.facts
    return {'file': str(log.path), 'passed': log.passed, 'error': log.error,
            'can_claim': log.claims, 'best_top1': facts.best_top1 if facts else None,
            'dataset': facts.dataset if facts else None, 'is_imagenet': facts.is_imagenet if facts else None,
            'num_resumes': facts.num_resumes if facts else None,
            'verdicts': [{'ruleset': v.ruleset, 'division': v.division, 'passed': v.passed,
                          'violations': v.violations} for v in log.verdicts]}
