"""Verdicts on logs: whether a log, or the logs of a folder, are valid for their round."""
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.load import make_run_set
from mlperf_rn50.analysis.sets.rcp import check_rcp, official_score_minutes
from mlperf_rn50.analysis.sets.run_set import RUNS_OF_A_SCORE, RunSet
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.judge import CheckedLog
from mlperf_rn50.mllog.package.submission import judge_runs
from mlperf_rn50.mllog.rulesets import ROUND_OF, ROUNDS, RULESETS, V05, render_rounds
from mlperf_rn50.runfolder.names import run_number
from mlperf_rn50.text import grouped, percent, plural, printable

_MAX_REASONS = 3  # maximum number of reasons on a line


@dataclass(frozen=True)
class Verdict:
    """Verdict on a log, or on the logs of a folder, by the rules of one round."""

    place: Path  # log or folder
    logs: Sequence[CheckedLog]
    run_set: RunSet
    passed: Sequence[str]  # rulesets that the logs pass
    ruleset: str | None  # of the logged round, else the oldest passed, else the newest; None if all are unreadable
    violations: Sequence[str]  # of this ruleset
    obstacles: Sequence[str]  # reasons why logs without violations cannot be submitted

    @property
    def is_valid(self) -> bool:
        return not self.violations and not self.obstacles


def make_verdicts(logs: Sequence[CheckedLog], division: str | None) -> list[Verdict]:
    """Return a verdict for each folder of logs; logs with other names than result_<k>.txt are a group of their own."""
    groups = grouped(logs, lambda log: (log.path.parent, run_number(log.path.name) is None))
    return [_make_verdict(group, division) for group in groups.values()]


def _make_verdict(logs: Sequence[CheckedLog], division: str | None) -> Verdict:
    """Judge the logs of a set. As in MLPerf, one of five may fail."""
    paths, count = [log.path for log in logs], len(logs)
    run_set = make_run_set(paths[0].parent, paths, [log.loaded for log in logs])
    failures = {r: _failures(logs, r) for r in RULESETS if any(v.ruleset == r for log in logs for v in log.verdicts)}
    passed = [r for r, failed in failures.items() if len(failed) <= (count == RUNS_OF_A_SCORE)]
    named = ROUNDS.get(run_set.round)
    ruleset = named if named in failures else next(iter([*passed, *reversed(failures)]), None)
    obstacles = sorted({r.dataset for r in run_set.runs if r.dataset and not r.is_imagenet})
    obstacles += ['resumed'] * any(r.num_resumes for r in run_set.runs)
    if count != RUNS_OF_A_SCORE:
        obstacles += sorted({r.status for r in run_set.runs} - {'converged'})
        obstacles += [f'{count} runs, expected {RUNS_OF_A_SCORE}'] * (count > 1)
    if ruleset not in passed:
        violations = _folded(failures[ruleset] if ruleset else [(str(log.error),) for log in logs], count)
    elif count == RUNS_OF_A_SCORE and 'resumed' not in obstacles:
        violations, _ = judge_runs(run_set.runs, ruleset, division)
        rcp = check_rcp(run_set) if run_set.division == keys.CLOSED and named == ruleset else None
        violations += [f'epochs to converge: {rcp.text}'] if rcp and rcp.is_of_round and not rcp.passed else []
    else:
        violations = []
    place = paths[0] if count == 1 else paths[0].parent
    return Verdict(place, logs, run_set, passed, ruleset, violations, obstacles)


def _failures(logs: Iterable[CheckedLog], ruleset: str) -> list[tuple[str, ...]]:
    """Return the violations of each log that fails a ruleset."""
    found = [v.violations for log in logs for v in log.verdicts if v.ruleset == ruleset and not v.passed]
    return found + [(log.error,) for log in logs if log.error]


def _folded(failures: Iterable[Sequence[str]], count: int) -> list[str]:
    """Return each violation once, with its number of logs if there are several."""
    found = Counter(text for violations in failures for text in dict.fromkeys(violations))
    return [f'{plural(n, "log")}: ' * (count > 1) + text for text, n in found.most_common()]


def _joined(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MAX_REASONS
    return '; '.join([*reasons[:_MAX_REASONS], *([f'{more} more'] if more > 0 else [])])


def render_verdict(verdict: Verdict) -> str:
    """Return a verdict, with the score of a set, as a line."""
    divisions = [v.division for log in verdict.logs for v in log.verdicts if v.ruleset == verdict.ruleset != V05]
    name = ' '.join([' for', ROUND_OF[verdict.ruleset], *divisions[:1]]) if verdict.ruleset else ''
    if verdict.violations:
        return f'valid{name}: no ({_joined(verdict.violations)})'
    text = f'valid{name}: yes' if verdict.is_valid else (
        f'format passes: {render_rounds(verdict.passed)}; can be submitted: no ({_joined(verdict.obstacles)})')
    minutes, official = verdict.run_set.score_minutes, official_score_minutes(verdict.run_set)
    if minutes is None or official is None:
        return text + f'. A score needs {RUNS_OF_A_SCORE} such logs' * (verdict.is_valid and len(verdict.logs) == 1)
    has_miss = any(r.status != 'converged' for r in verdict.run_set.runs)
    return (f'{text}. Set of {RUNS_OF_A_SCORE}: score {minutes:.2f} min'
            + f', scaled by reference convergence {official:.2f}' * (official != minutes)
            + ' (one run did not converge; one may)' * has_miss)


def render_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return the verdict or, for several sets, their number and the verdict on each, then other rounds and notes."""
    logs = [log for v in verdicts for log in v.logs]
    if len(verdicts) == 1:
        lines = [render_verdict(verdicts[0]), f'  {verdicts[0].place}' + f', {len(logs)} logs' * (len(logs) > 1),
                 *(f'  - {text}' for text in verdicts[0].violations[_MAX_REASONS:])]
    else:
        num_valid, num_formal = (sum(not v.violations and v.is_valid == is_valid for v in verdicts)
                                 for is_valid in (True, False))
        lines = [f'valid for their rounds: {num_valid} of {len(verdicts)} sets, {len(logs)} logs'
                 + f'; {num_formal} more pass the format' * bool(num_formal),
                 *(f'  {v.place}: {render_verdict(v)}' for v in verdicts)]
    factors = Counter(log.last_step_lr_factor for log in logs if any(x.division == keys.CLOSED for x in log.verdicts))
    lines += _other_rounds(verdicts)
    lines += [f'  note: the last step of an epoch fills {percent(factor)} of its batch and scales its learning rate by '
              f'{factor:.4g}; in the reference, all steps are full, as with data.last_batch=wrap ({plural(n, "log")})'
              for factor, n in factors.items() if factor and factor < 1]
    return '\n'.join(map(printable, lines))


def _other_rounds(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line about the other rounds whose rules were checked; rounds with equal results are folded."""
    results: dict[tuple[str, ...], list[str]] = {}
    for ruleset in RULESETS:
        others = [v for v in verdicts if v.ruleset != ruleset and any(
            x.ruleset == ruleset for log in v.logs for x in log.verdicts)]
        logs = [log for v in others if ruleset not in v.passed for log in v.logs]
        if logs or any(v.is_valid or v.violations for v in others):  # format passes already lists passed rounds
            reasons = _folded([failed[:1] for failed in _failures(logs, ruleset)], len(logs))
            results.setdefault(tuple(reasons), []).append(ruleset)
    texts = [f'{render_rounds(rulesets)} ' + (f'no ({_joined(reasons)})' if reasons else 'yes')
             for reasons, rulesets in results.items()]
    return [f'  rules of other rounds (not required): {"; ".join(texts)}'] if texts else []


def verdicts_as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts as JSON with the keys of docs/results.md."""
    return [{'place': str(v.place), 'num_logs': len(v.logs), 'round': v.ruleset and ROUND_OF[v.ruleset],
             'is_valid': v.is_valid, 'violations': v.violations, 'obstacles': v.obstacles,
             'passed_rounds': [ROUND_OF[r] for r in v.passed], 'score_minutes': v.run_set.score_minutes,
             'official_score_minutes': official_score_minutes(v.run_set)} for v in verdicts]
