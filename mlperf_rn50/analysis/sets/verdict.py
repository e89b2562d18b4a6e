"""Verdicts on logs: whether a log, or the logs of a folder, are valid for their round."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.judgement import folded, passed_rulesets, violations_of
from mlperf_rn50.analysis.sets.rcp import official_score_minutes
from mlperf_rn50.analysis.sets.run_set import RUNS_OF_A_SCORE, RunSet
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.judge import CheckedLog
from mlperf_rn50.mllog.rulesets import ROUND_OF, RULESETS, V05, render_rounds
from mlperf_rn50.text import percent, plural, printable

_MAX_REASONS = 3  # maximum number of reasons on a line


@dataclass(frozen=True)
class Verdict:
    """Verdict on a log, or on the logs of a folder, by the rules of one round."""

    run_set: RunSet
    passed: Sequence[str]  # rulesets that the logs pass

    @property
    def logs(self) -> Sequence[CheckedLog]:
        return self.run_set.logs

    @property
    def place(self) -> Path:
        """Log or folder."""
        return self.logs[0].path if len(self.logs) == 1 else self.run_set.folder

    @property
    def is_valid(self) -> bool:
        return not self.run_set.judgement.violations and not self.run_set.judgement.obstacles


def make_verdicts(run_sets: Sequence[RunSet]) -> list[Verdict]:
    """Return a verdict for each set of checked logs. As in MLPerf, one of five may fail."""
    return [
        Verdict(s, tuple(passed_rulesets(s.logs)) if s.judgement.is_sound else ())
        for x in run_sets
        for s in (x, *x.later)
    ]


def _joined(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MAX_REASONS
    return '; '.join([*reasons[:_MAX_REASONS], *([f'{more} more'] if more > 0 else [])])


def render_verdict(verdict: Verdict) -> str:
    """Return a verdict, with the score of a set, as a line."""
    run_set, judged = verdict.run_set, verdict.run_set.judgement
    divisions = [
        log.result(judged.ruleset).division
        for log in verdict.logs
        if judged.ruleset in log.rulesets and judged.ruleset != V05
    ]
    name = ' '.join([' for', ROUND_OF[judged.ruleset], *divisions[:1]]) if judged.ruleset else ''
    if judged.violations:
        return f'valid{name}: no ({_joined(judged.violations)})'
    text = (
        f'valid{name}: yes'
        if verdict.is_valid
        else 'no verdict yet'
        if 'running' in judged.obstacles
        else (f'format passes: {render_rounds(verdict.passed)}')
    )
    if judged.obstacles:
        text += f'; can be submitted: no ({_joined(judged.obstacles)})'
    minutes, official = run_set.score_minutes, official_score_minutes(run_set)
    if minutes is None or official is None:
        return text + f'. A score needs {RUNS_OF_A_SCORE} such logs' * (
            verdict.is_valid and len(verdict.logs) == 1
        )
    missed = ''.join(
        f' (one may fail: {path.name}, {reason})' for path, reason in judged.misses.items()
    )
    return (
        f'{text}. Set of {RUNS_OF_A_SCORE}: score {minutes:.2f} min'
        + f', scaled by reference convergence {official:.2f}' * (official != minutes)
        + missed
    )


def _basis(verdict: Verdict) -> str:
    """Return how the round in a verdict was chosen, unless it was given or is in the name of a
    folder."""
    judged = verdict.run_set.judgement
    # these list all rounds
    if not judged.ruleset or not judged.basis or judged.obstacles and not judged.violations:
        return ''
    return (
        f', judged by {ROUND_OF[judged.ruleset]}, {judged.basis}; --ruleset ROUND selects another'
    )


def render_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return the verdict or, for several sets, their number and the verdict on each, then other
    rounds and notes."""
    logs = [log for v in verdicts for log in v.logs]
    if len(verdicts) == 1:
        [verdict] = verdicts
        lines = [
            render_verdict(verdict),
            f'  {verdict.place}' + f', {len(logs)} logs' * (len(logs) > 1) + _basis(verdict),
            *(f'  - {text}' for text in verdict.run_set.judgement.violations[_MAX_REASONS:]),
        ]
    else:
        num_valid, num_formal = (
            sum(not v.run_set.judgement.violations and v.is_valid == is_valid for v in verdicts)
            for is_valid in (True, False)
        )
        lines = [
            f'valid for their rounds: {num_valid} of {len(verdicts)} sets, {len(logs)} logs'
            + f'; {num_formal} more pass the format' * bool(num_formal),
            *(f'  {v.place}: {render_verdict(v)}{_basis(v)}' for v in verdicts),
        ]
    factors = Counter(
        log.last_step_lr_factor
        for log in logs
        if any(x.division == keys.CLOSED for x in log.verdicts)
    )
    lines += _other_rounds(verdicts)
    lines += [
        f'  note: the last step of an epoch fills {percent(factor)} of its batch and scales its '
        'learning rate by '
        f'{factor:.4g}; in the reference, all steps are full, as with data.last_batch=wrap '
        f'({plural(n, "log")})'
        for factor, n in factors.items()
        if factor and factor < 1
    ]
    return '\n'.join(map(printable, lines))


def _other_rounds(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line about the other rounds whose rules were checked; rounds with equal results are
    folded."""
    results: dict[tuple[str, ...], list[str]] = {}
    for ruleset in RULESETS:
        others = [
            v
            for v in verdicts
            if v.run_set.judgement.ruleset != ruleset
            and v.run_set.judgement.is_sound
            and any(ruleset in log.rulesets for log in v.logs)
        ]
        logs = [log for v in others if ruleset not in v.passed for log in v.logs]
        # others list passed rounds
        if logs or any(v.is_valid or v.run_set.judgement.violations for v in others):
            broken = violations_of(logs, ruleset)
            reasons = folded({log.path: broken.get(log.path, ())[:1] for log in logs})
            results.setdefault(tuple(reasons), []).append(ruleset)
    texts = [
        f'{render_rounds(rulesets)} ' + (f'no ({_joined(reasons)})' if reasons else 'yes')
        for reasons, rulesets in results.items()
    ]
    return [f'  rules of other rounds (not required): {"; ".join(texts)}'] if texts else []


def verdicts_as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts as JSON with the keys of docs/results.md."""
    return [
        {
            'place': str(v.place),
            'num_logs': len(v.logs),
            'round': j.ruleset and ROUND_OF[j.ruleset],
            'is_valid': v.is_valid,
            'violations': j.violations,
            'obstacles': j.obstacles,
            'passed_rounds': [ROUND_OF[r] for r in v.passed],
            'score_minutes': v.run_set.score_minutes,
            'official_score_minutes': official_score_minutes(v.run_set),
        }
        for v in verdicts
        for j in [v.run_set.judgement]
    ]
