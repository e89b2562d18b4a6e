"""The rules on a set of runs, whatever the layout of its tree: which sets are refused, and what is odd about one."""
from collections import Counter
from collections.abc import Sequence

from mlperf_rn50.mlperf import check
from mlperf_rn50.mlperf.copies import find_copies
from mlperf_rn50.mlperf.official import Finding, find_danger
from mlperf_rn50.mlperf.run import Run

NUM_RESULTS = 5
_MAX_WARNINGS = 3  # of a log that are said here; report says all


def check_set(runs: Sequence[Run]) -> list[str]:
    """The rules that a set breaks, whatever its single logs say; a sentence each."""
    refusals = []
    if len(runs) != NUM_RESULTS:
        refusals.append(f'a ResNet result is {NUM_RESULTS} runs; here are {len(runs)}')
    failed = [r for r in runs if r.status != 'converged']
    if len(failed) > 1:
        refusals.append(f'one run of five may fail; here {len(failed)} did: '
                        + ', '.join(f'{r.path.name} ({r.status})' for r in failed))
    refusals += [f'{r.path.name}: is still being written' for r in runs if r.status == 'running']
    refusals += [f'{r.path.name}: a log that spans a resume is not that of one timed run'
                 for r in runs if r.num_resumes]
    refusals += [copy.text for copy in find_copies(runs)]
    divisions = sorted({str(r.division) for r in runs if r.status != 'unreadable'})
    if len(divisions) > 1:
        refusals.append(f'a set has one division; the logs name {", ".join(divisions)}')
    if 'closed' in divisions and not all(r.is_imagenet for r in runs):
        refusals.append('the closed division trains on ImageNet; these logs are of other data')
    seeds = [r.seed for r in runs if r.seed is not None]
    if len(set(seeds)) < len(seeds):
        refusals.append('every run has a seed of its own; here some share one')
    return refusals + [f'{r.path.name}: is no file' for r in runs if not r.path.is_file()]


def check_results(runs: Sequence[Run], ruleset: str) -> tuple[list[str], Finding]:
    """Return what a ruleset has against the logs, where more than the one that may fail do, and how many pass.

    A log that could steer, stall or crash the official tools is refused whatever the others are.
    """
    if dangers := [f'{r.path.name}: {danger}' for r in runs if (danger := find_danger(r.path, ruleset))]:
        return dangers, ('logs', 'not checked')
    verdicts = [(r, check.check_log(r.path, [ruleset]).verdicts[0]) for r in runs
                if r.status != 'unreadable']
    violations = [f'{r.path.name}: {text}' for r, v in verdicts for text in v.violations]
    violations += [f'{r.path.name}: did not converge ({r.status})' for r, v in verdicts
                   if v.passed and r.status != 'converged']
    good = sum(v.passed for _, v in verdicts)
    num_failed = len(runs) - sum(v.passed and r.status == 'converged' for r, v in verdicts)
    tolerated = '; one may fail' if good < len(runs) else ''
    finding = 'logs', f'{good} of {len(runs)} pass the rules of {ruleset}{tolerated}'
    return violations if num_failed > 1 else [], finding


def find_oddities(runs: Sequence[Run]) -> list[str]:
    """What to know of an accepted set before anything else: a run that failed, and what is odd about the logs."""
    result = [f'one of {len(runs)} did not converge ({r.path.name}: {r.status}): it counts as the slowest'
              for r in runs if r.status != 'converged']
    counts = Counter(text for r in runs for text in dict.fromkeys(w.text for w in r.warnings))
    shared = [text for text, count in counts.items() if count == len(runs) > 1]
    result += [f'all {len(runs)} logs: {text}' for text in shared]
    for run in runs:
        own = [w for w in run.warnings if w.text not in shared]
        result += [f'{run.path.name}{"" if w.line is None else f":{w.line}"}: {w.text}' for w in own[:_MAX_WARNINGS]]
        if len(own) > _MAX_WARNINGS:
            result.append(f'{run.path.name}: {len(own) - _MAX_WARNINGS} more of this kind, which report says')
    return result
