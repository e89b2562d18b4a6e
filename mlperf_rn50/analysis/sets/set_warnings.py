"""Warnings about a run set: refusal, duplicates, contradictions and weak evidence. Pure functions."""
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from mlperf_rn50.analysis.sets.run_set import RUNS_OF_A_SCORE, RunSet
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.run import LogWarning, Run
from mlperf_rn50.text import plural

_MAX_MISSING = 10  # maximum missing logs listed in a warning


def render_warning(run: Run, warning: LogWarning) -> str:
    line = '' if warning.line is None else f':{warning.line}'
    return f'{run.path.name}{line}: {warning.text}'


def _failures(runs: Sequence[Run]) -> list[str]:
    """Return a warning for each reason why runs do not count as converged."""
    unread = sum(r.status == 'unreadable' for r in runs)
    # These runs reached the target and ended, but their logs contradict themselves about the time or status.
    unclear = sum(r.status == 'failed' and keys.RUN_STOP in r.lines and r.target_accuracy is not None
                  and (r.final_accuracy or 0.0) >= r.target_accuracy for r in runs)
    short = sum(r.status not in ('converged', 'running') for r in runs) - unread - unclear
    texts = [(unread, 'logs cannot be read and count as not converged'),
             (unclear, 'runs do not count because their logs contradict themselves'),
             (short, 'runs did not converge')]
    return [f'{count} of {len(runs)} {text}' for count, text in texts if count]


def _missing_numbers(runs: Sequence[Run]) -> list[str]:
    """Return a warning about gaps in the numbers of result_<k>.txt, which start from 0 or 1."""
    names = [re.fullmatch(r'result_(\d{1,9})\.txt', r.path.name) for r in runs]
    numbers = {int(m[1]) for m in names if m}
    if len(numbers) < 2 or not all(names):
        return []
    wanted = range(min(*numbers, 1), max(numbers) + 1)
    count = len(wanted) - len(numbers)
    first = ', '.join(map(str, islice((k for k in wanted if k not in numbers), _MAX_MISSING)))
    more = f' and {count - _MAX_MISSING} more' if count > _MAX_MISSING else ''
    return [f'result_<k>.txt is missing for k = {first}{more}; the numbering has a gap'] if count else []


def _weaknesses(run_set: RunSet) -> list[str]:
    if run_set.refusal:
        return []
    runs, num_running = run_set.counted, sum(r.status == 'running' for r in run_set.runs)
    result = _failures(runs)
    if num_running:
        result.append(f'no MLPerf score yet: {num_running} of {len(runs)} runs are still running')
    elif len(runs) == RUNS_OF_A_SCORE and run_set.score_minutes is None:
        result.append('no MLPerf score: two or more runs without convergence make the set invalid')
    elif len(runs) != RUNS_OF_A_SCORE:
        result.append(f'no MLPerf score: got {plural(len(runs), "run")}, expected {RUNS_OF_A_SCORE}'
                      + ('; the spread of a single run is unknown' if len(runs) == 1 else ''))
    seeds = Counter(r.seed for r in runs if r.seed is not None)
    result += [f'{count} runs have the same seed {seed}' for seed, count in seeds.items() if count > 1]
    if not seeds and sum(r.status != 'unreadable' for r in runs) > 1:
        result.append('no log contains a seed; the runs may have the same seed')
    result += _missing_numbers(run_set.runs)
    period, epochs = run_set.eval_period, run_set.epochs
    if period and epochs and 0 < max(epochs) - min(epochs) <= period:
        result.append('the runs differ by at most one evaluation; a smaller eval_period gives better resolution')
    if not run_set.is_imagenet:
        result.append(f'the data set is {run_set.dataset or "unnamed"}, not ImageNet')
    return result


def _log_warnings(run_set: RunSet, is_contradiction: bool) -> list[str]:
    """Return warnings about the logs; a warning that applies to all logs is returned only once."""
    found = [(r, w) for r in run_set.runs for w in r.warnings if w.is_contradiction == is_contradiction]
    counts = Counter(text for text, _ in dict.fromkeys((w.text, r.path) for r, w in found))
    shared = {text: None for text, count in counts.items() if count == len(run_set.runs) > 1}
    return [*(f'all {len(run_set.runs)} logs: {text}' for text in shared),
            *(render_warning(r, w) for r, w in found if w.text not in shared)]


def set_warnings(run_set: RunSet) -> list[str]:
    """Return refusal, duplicates and contradictions, then weak evidence, then remarks and warnings about the logs."""
    return [*filter(None, [run_set.refusal]), *run_set.doubts, *(f'{d.text}; counted once' for d in run_set.duplicates),
            *_log_warnings(run_set, True), *filter(None, [run_set.speed_doubt]), *_weaknesses(run_set),
            *run_set.remarks, *_log_warnings(run_set, False)]
