"""Verdicts on logs: whether a log, or the logs of a folder, are valid for their round."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.judgement import (
    folded,
    lacks_epochs,
    passed_rulesets,
    violations_of,
)
from mlperf_rn50.analysis.sets.load import OtherBenchmark, describe_others
from mlperf_rn50.analysis.sets.rcp import official_score_minutes
from mlperf_rn50.analysis.sets.run_set import RUNS_OF_A_SCORE, RunSet
from mlperf_rn50.answer import Answer, Cell
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.judge import CheckedLog, logs_as_json
from mlperf_rn50.mllog.rulesets import ROUND_OF, RULESETS, V05, render_rounds
from mlperf_rn50.text import percent, plural

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


def _joined(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MAX_REASONS
    return '; '.join([*reasons[:_MAX_REASONS], *([f'{more} more'] if more > 0 else [])])


def _verdict_text(verdict: Verdict) -> str:
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
    if verdict.is_valid:
        text = f'valid{name}: yes'
    elif 'running' in judged.obstacles:
        text = 'no verdict yet'
    else:
        text = f'format passes: {render_rounds(verdict.passed)}'
    if judged.obstacles:
        text += f'; can be submitted: no ({_joined(judged.obstacles)})'
    minutes, official = run_set.score_minutes, official_score_minutes(run_set)
    if minutes is None or official is None:
        if verdict.is_valid and len(verdict.logs) == 1:
            text += f'. A score needs {RUNS_OF_A_SCORE} such logs'
        return text
    text += f'. Set of {RUNS_OF_A_SCORE}: score {minutes:.2f} min'
    if official != minutes:
        text += f', scaled by reference convergence {official:.2f}'
    for path, reason in judged.misses.items():
        text += f' (one may fail: {path.name}, {reason})'
    return text


def _basis(verdict: Verdict) -> str:
    """Return how the round in a verdict was chosen, unless it was given or is in the name of a
    folder."""
    judged = verdict.run_set.judgement
    lists_all_rounds = judged.obstacles and not judged.violations
    if not judged.ruleset or not judged.basis or lists_all_rounds:
        return ''
    return (
        f', judged by {ROUND_OF[judged.ruleset]}, {judged.basis}; --ruleset ROUND selects another'
    )


def _passed(run_set: RunSet) -> tuple[str, ...]:
    """Return the rulesets that a set passes."""
    if not run_set.judgement.is_sound:
        return ()
    return tuple(r for r in passed_rulesets(run_set.logs) if not lacks_epochs(run_set, r))


def make_check(run_sets: Sequence[RunSet], others: Sequence[OtherBenchmark] = ()) -> Answer:
    """Return the verdicts on sets of checked logs, and skipped logs of other benchmarks. As in
    MLPerf, one of five may fail."""
    verdicts = [Verdict(s, _passed(s)) for run_set in run_sets for s in (run_set, *run_set.later)]
    logs = [log for v in verdicts for log in v.logs]
    is_passed = not any(v.run_set.judgement.violations for v in verdicts)
    first, *lines = _one_verdict(*verdicts) if len(verdicts) == 1 else _all_verdicts(verdicts)
    lines += [*_other_rounds(verdicts), *_partial_steps(logs)]
    if others:
        lines.append(f'  {describe_others(others)}')
    return Answer(
        sentences=[(Cell(first, level='good' if is_passed else 'bad'),), *lines],
        data={
            **logs_as_json(logs),
            'sets': list(map(_verdict_object, verdicts)),
            'num_other_benchmarks': len(others),
        },
        exit_code=EXIT_OK if is_passed else EXIT_FAILED,
    )


def _one_verdict(verdict: Verdict) -> list[str]:
    """Return the verdict on the only set, its place, and all its violations."""
    num_logs = f', {len(verdict.logs)} logs' if len(verdict.logs) > 1 else ''
    return [
        _verdict_text(verdict),
        f'  {verdict.place}{num_logs}{_basis(verdict)}',
        *(f'  - {text}' for text in verdict.run_set.judgement.violations[_MAX_REASONS:]),
    ]


def _all_verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the number of valid sets, and a line for each set."""
    num_logs = sum(len(v.logs) for v in verdicts)
    num_valid = sum(v.is_valid for v in verdicts)
    num_formal = sum(not v.run_set.judgement.violations for v in verdicts) - num_valid
    more = ''
    if num_formal:
        more = f'; format passes, but cannot be submitted: {plural(num_formal, "set")}'
    return [
        f'valid for their rounds: {num_valid} of {len(verdicts)} sets ({num_logs} logs){more}',
        *(f'  {v.place}: {_verdict_text(v)}{_basis(v)}' for v in verdicts),
    ]


def _partial_steps(logs: Iterable[CheckedLog]) -> list[str]:
    """Return notes about the last, partly filled steps of epochs in the closed division."""
    factors = Counter(
        log.last_step_lr_factor
        for log in logs
        if any(x.division == keys.CLOSED for x in log.verdicts)
    )
    return [
        f'  note: the last step of an epoch fills {percent(factor)} of its batch and scales its '
        f'learning rate by {factor:.4g}; in the reference, all steps are full, as with '
        f'data.last_batch=wrap ({plural(n, "log")})'
        for factor, n in factors.items()
        if factor and factor < 1
    ]


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
        short = {v: text for v in others if (text := lacks_epochs(v.run_set, ruleset))}
        failed = [v for v in others if ruleset not in v.passed and v not in short]
        logs = [log for v in failed for log in v.logs]
        # The line on a set without a verdict lists the rounds that it passes.
        if logs or short or any(v.is_valid or v.run_set.judgement.violations for v in others):
            broken = violations_of(logs, ruleset)
            reasons = folded({log.path: broken.get(log.path, ())[:1] for log in logs})
            reasons += [
                f'{v.run_set.name}: {text}' if len(verdicts) > 1 else text
                for v, text in short.items()
            ]
            results.setdefault(tuple(reasons), []).append(ruleset)
    texts = [
        f'{render_rounds(rulesets)} ' + (f'no ({_joined(reasons)})' if reasons else 'yes')
        for reasons, rulesets in results.items()
    ]
    return [f'  rules of other rounds (not required): {"; ".join(texts)}'] if texts else []


def _verdict_object(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON with the keys of docs/output.md."""
    run_set, judged = verdict.run_set, verdict.run_set.judgement
    return {
        'place': str(verdict.place),
        'num_logs': len(verdict.logs),
        'round': judged.ruleset and ROUND_OF[judged.ruleset],
        'is_valid': verdict.is_valid,
        'violations': judged.violations,
        'obstacles': judged.obstacles,
        'passed_rounds': [ROUND_OF[r] for r in verdict.passed],
        'score_minutes': run_set.score_minutes,
        'official_score_minutes': official_score_minutes(run_set),
    }
