"""Check epochs to converge against MLPerf's reference convergence points, with its official data
and statistics."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from mlperf_rn50.analysis.sets.run_set import RunSet, olympic_mean
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.logged_run import TARGET

_RULESETS = ('1.0.0', '1.1.0', '2.0.0', '2.1.0', '3.0.0', '3.1.0', '4.0.0')


@dataclass(frozen=True)
class RcpVerdict:
    """Verdict on a run set, from the reference points of the official rcp_checker."""

    ruleset: str  # source of the points; the newest if the round has none
    is_of_round: bool  # whether the ruleset belongs to the round of the set
    # mean at this batch, perhaps interpolated; None above all batches
    reference_epochs: float | None
    min_epochs: float | None  # minimum epochs to pass; None above all batches
    epochs: float  # mean over all runs except the ones with the fewest and the most epochs
    passed: bool
    scaling: float  # the scaled score divided by the unscaled one
    text: str


def _ruleset(run_set: RunSet) -> str | None:
    """Return the ruleset by which a set was judged, else that of its round; None if it has no
    points."""
    ruleset = run_set.judgement.ruleset or f'{run_set.round[1:]}.0'
    return ruleset if ruleset in _RULESETS else None


def is_scaled(run_set: RunSet) -> bool:
    """Return whether result_summarizer may scale a score: closed division, round with reference
    points, 75.9 %."""
    return (
        _ruleset(run_set) is not None
        and {r.division for r in run_set.runs if r.division} == {keys.CLOSED}
        and all(
            (r.final_accuracy or 0) >= TARGET
            for r in run_set.converged
            if r.path not in run_set.judgement.misses
        )
    )


def is_applicable(run_set: RunSet) -> bool:
    """Return whether the points apply to a set: five ImageNet runs to 75.9 %, of which at least
    four converged."""
    return (
        run_set.is_imagenet
        and run_set.score_minutes is not None
        and run_set.global_batch_size is not None
        and (run_set.target_accuracy == TARGET or is_scaled(run_set))
    )


def olympic_epochs(run_set: RunSet) -> float:
    """Return the mean of the logged epochs without the lowest and the highest. A run that did not
    converge counts as the highest."""
    return olympic_mean(
        [(r.epochs_to_converge or float('inf')) - r.is_from_0 for r in run_set.counted]
    )


@functools.cache
def _checker(ruleset: str) -> Any:
    """Return the official checker with its points. The checker imports scipy, which takes a
    second."""
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    return RCP_Checker('training', ruleset, 'resnet', False)


def reference_points() -> list[tuple[int, float]]:
    """Return (batch, mean epochs) of the newest official pruned points, or [] if mlperf-logging is
    not installed."""
    try:
        points = _checker(_RULESETS[-1]).pruned_rcp_data.values()
    except ImportError:
        return []
    return sorted((int(r['BS']), float(r['RCP Mean'])) for r in points)


def check_rcp(run_set: RunSet) -> RcpVerdict | None:
    """Return the verdict from the official pruned points, or None if none apply or mlperf-logging
    is not installed."""
    if not is_applicable(run_set):
        return None
    ruleset = _ruleset(run_set)
    try:
        return _verdict(
            ruleset or _RULESETS[-1],
            is_of_round=ruleset is not None,
            has_scaling=is_scaled(run_set),
            batch=run_set.global_batch_size or 0,
            epochs=olympic_epochs(run_set),
        )
    except ImportError:
        return None


@functools.cache
def _verdict(
    ruleset: str, is_of_round: bool, has_scaling: bool, batch: int, epochs: float
) -> RcpVerdict:
    checker = _checker(ruleset)
    points = sorted(checker.pruned_rcp_data.values(), key=lambda r: r['BS'])
    below = [r for r in points if r['BS'] <= batch]
    above = [r for r in points if r['BS'] >= batch]
    failed = RcpVerdict(
        ruleset=ruleset,
        is_of_round=is_of_round,
        reference_epochs=None,
        min_epochs=None,
        epochs=epochs,
        passed=False,
        scaling=1.0,
        text=(
            f'fails: no reference for a batch of {batch}, above {points[-1]["BS"]}; a '
            'reference must be submitted'
        ),
    )
    if not above:
        return failed
    point = above[0]  # of this batch size, or of the smallest batch size if all are larger
    if below and below[-1]['BS'] < batch < above[0]['BS']:
        point = checker._create_interp_rcp(batch, below[-1], above[0])[1]
    mean, least = float(point['RCP Mean']), float(point['RCP Mean'] / point['Max Speedup'])
    known = replace(failed, reference_epochs=mean, min_epochs=least)
    if epochs < least:
        text = (
            f'fails: mean {epochs:.2f} epochs at batch {batch}, at least {least:.2f} are credible '
            f'(reference {mean:.2f})'
        )
        if not below:
            text += f'; a reference for a batch of {batch} must be submitted'
        return replace(known, text=text)
    text = f'passes: {epochs:.2f} epochs, reference {mean:.2f}, at least {least:.2f}'
    factor = max(mean / epochs, 1.0)
    if factor > 1:
        text += f'; the score {"is" if has_scaling else "would be"} scaled by {factor:.4f}'
    return replace(known, passed=True, scaling=factor if has_scaling else 1.0, text=text)


def official_score_minutes(run_set: RunSet) -> float | None:
    """Return the score as result_summarizer computes it, scaled if the runs took fewer epochs than
    the reference."""
    score, verdict = run_set.score_minutes, check_rcp(run_set)
    return score * verdict.scaling if score and verdict else score
