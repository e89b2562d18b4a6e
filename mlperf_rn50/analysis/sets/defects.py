"""Findings about a run set: refusal, duplicates, weak evidence and findings in its logs. Pure
functions."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from mlperf_rn50.analysis.sets.run_set import MAX_PER_NODE, RUNS_OF_A_SCORE, RunSet
from mlperf_rn50.mllog.findings import Finding, make_finding, most_severe
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.rulesets import ROUND_OF
from mlperf_rn50.runfolder.names import run_number
from mlperf_rn50.text import grouped, plural

_MAX_MISSING = 10  # maximum missing logs listed in a finding


def render_finding(finding: Finding) -> str:
    name = finding.file.name if finding.file else ''
    line = '' if finding.line is None else f':{finding.line}'
    place = '' if finding.text.startswith(name) else f'{name}{line}: '
    return f'{finding.grade}: {place}{finding.text}'


def _failures(run_set: RunSet) -> list[Finding]:
    """Return a finding for each reason why runs do not count as converged, only a note if the set
    has a score."""
    runs = run_set.counted
    unread = sum(r.status == 'unreadable' for r in runs)
    short = sum(r.status not in ('converged', 'running') for r in runs) - unread
    found = []
    if unread:
        found.append(make_finding('runs_unreadable', None, unread, len(runs)))
    if short:
        found.append(make_finding('runs_unconverged', None, short, len(runs)))
    if short and run_set.score_minutes is not None:
        found[-1] = found[-1]._replace(grade='note')
    return found


def _misses(run_set: RunSet) -> Iterator[Finding]:
    """Yield a warning for each converged run that counts as the slowest of a score, because its log
    breaks a rule."""
    if run_set.score_minutes is None:
        return
    for run in run_set.converged:
        if reason := run_set.judgement.misses.get(run.path):
            yield make_finding('run_counts_as_failed', None, reason, file=run.path)


def _missing_numbers(runs: Sequence[Run]) -> list[Finding]:
    """Return a warning about gaps in the numbers of result_<k>.txt, which start from 0 or 1."""
    numbers = {k for r in runs if (k := run_number(r.path.name)) is not None}
    if len(numbers) < max(2, len(runs)):
        return []
    wanted = range(min(*numbers, 1), max(numbers) + 1)
    count = len(wanted) - len(numbers)
    first = ', '.join(map(str, islice((k for k in wanted if k not in numbers), _MAX_MISSING)))
    more = f' and {count - _MAX_MISSING} more' if count > _MAX_MISSING else ''
    return [make_finding('numbers_missing', None, first + more)] if count else []


def _weaknesses(run_set: RunSet) -> Iterator[Finding]:
    if run_set.refusal:
        return
    runs, num_running = run_set.counted, sum(r.status == 'running' for r in run_set.runs)
    yield from _failures(run_set)
    yield from _misses(run_set)
    if num_running:
        yield make_finding('runs_unfinished', None, num_running, len(runs))
    elif run_set.resumed:
        verb = 'was' if len(run_set.resumed) == 1 else 'were'
        count = f'{len(run_set.resumed)} of {plural(len(runs), "run")} {verb} resumed'
        is_left_out = len(run_set.timed) < len(run_set.converged)
        more = '; means leave resumed runs out' if is_left_out else ''
        yield make_finding('runs_resumed', None, count, more)
    elif len(runs) != RUNS_OF_A_SCORE:
        yield make_finding(
            'runs_not_five',
            None,
            plural(len(runs), 'run'),
            RUNS_OF_A_SCORE,
            '; the spread of a single run is unknown' if len(runs) == 1 else '',
        )
    seeds = Counter(r.seed for r in runs if r.seed is not None)
    yield from (
        make_finding('seeds_equal', None, count, seed) for seed, count in seeds.items() if count > 1
    )
    if not seeds and sum(r.status != 'unreadable' for r in runs) > 1:
        yield make_finding('seeds_missing')
    yield from _missing_numbers(run_set.runs)
    period, epochs = run_set.eval_period, run_set.epochs
    if period and epochs and 0 < max(epochs) - min(epochs) <= period:
        yield make_finding('resolution_low')
    if run_set.num_nodes != run_set.stated_nodes:
        yield make_finding(
            'nodes_unknown',
            None,
            run_set.num_accelerators,
            plural(run_set.stated_nodes or 0, 'node'),
            MAX_PER_NODE,
        )
    if not run_set.is_imagenet:
        stated = next((r.data_text for r in run_set.runs if r.data_text), run_set.dataset)
        yield make_finding('not_imagenet', None, stated or 'unnamed')


def _log_findings(run_set: RunSet) -> list[Finding]:
    """Return findings about the logs; a finding that applies to all logs is returned only once."""
    found = [f for r in run_set.runs for f in r.findings]
    num_logs = len(run_set.runs)
    merged = {}
    for key, alike in grouped(found, lambda f: (f.grade, f.text)).items():
        if len({f.file for f in alike}) == num_logs > 1:
            text = f'all {num_logs} logs: {alike[0].text}'
            merged[key] = alike[0]._replace(line=None, text=text, file=None)
    return [*merged.values(), *(f for f in found if (f.grade, f.text) not in merged)]


def set_findings(run_set: RunSet) -> list[Finding]:
    """Return errors, then warnings, then notes; in each grade, those about the set precede those
    about its logs."""
    refusal = [make_finding('refused', None, run_set.refusal)] if run_set.refusal else []
    doubt = [run_set.speed_doubt] if run_set.speed_doubt else []
    parts = (
        [make_finding('settings_differ', None, run_set.parts_text)] if run_set.parts_text else []
    )
    judged = run_set.judgement
    if judged.ruleset and judged.basis:
        doubt.append(make_finding('judged_by', None, ROUND_OF[judged.ruleset], judged.basis))
    if judged.is_unchecked:
        doubt.append(make_finding('rules_unchecked'))
    again = [make_finding('submitted_again', None, s.round, s.folder) for s in run_set.later]
    again += [
        make_finding('refused_again', None, s.round, s.reasons[0])
        for s in run_set.later
        if s.reasons
    ]
    duplicates = [
        make_finding('duplicate', None, d.text, file=d.run.path) for d in run_set.duplicates
    ]
    of_logs = _log_findings(run_set)
    found = [*refusal, *duplicates, *of_logs]
    by = f' by the rules of {ROUND_OF[judged.ruleset]}' if judged.ruleset else ''
    rules = [
        make_finding('rule_broken', None, by, text)
        for text in judged.violations
        if not any(text.endswith(f.text) or f.text.startswith(text) for f in found)
    ]
    return most_severe(
        [
            *refusal,
            *rules,
            *run_set.findings,
            *duplicates,
            *doubt,
            *_weaknesses(run_set),
            *parts,
            *again,
            *of_logs,
        ]
    )
