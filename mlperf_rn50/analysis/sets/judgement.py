"""The one judgement of a run set: what is wrong with its logs, by themselves, together and by the
rules of a round.

`judge_set` is for every command that prints a verdict or a score: report, check, package, predict
and watch. Logs with a violation are refused and have no score. An obstacle, such as a resumed or a
running run, keeps logs from being submitted. Only the official checkers read files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.rcp import check_rcp
from mlperf_rn50.analysis.sets.run_set import RUNS_OF_A_SCORE, RunSet
from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.check.judge import CheckedLog, Judgement
from mlperf_rn50.mllog.check.official import NotInstalled, find_danger
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.resolve import normalized
from mlperf_rn50.mllog.rulesets import ROUND_OF, ROUNDS, RULESETS
from mlperf_rn50.text import grouped, some

# Facts that all runs of a set must share, and those that only converged and running ones must
# share.
_SHARED = (
    'target_accuracy',
    'num_nodes',
    'num_accelerators',
    'accelerator',
    'dataset',
    'round',
    'is_imagenet',
    'train_samples',
    'eval_samples',
)
_SHARED_IF_COUNTED = ('global_batch_size', 'opt_name')
_ELASTIC = 'global_batch_size', 'num_nodes', 'num_accelerators'
# Facts whose default comes from the rules or from ImageNet. They are known only if the log contains
# one of these keys.
_FACT_KEYS = {
    'is_imagenet': (keys.TRAIN_SAMPLES, 'dataset'),
    'train_samples': (keys.TRAIN_SAMPLES,),
    'eval_samples': (keys.EVAL_SAMPLES,),
}
# values that a log of this program leaves out
_UNLOGGED = {
    events.LR_DECAY: 'poly',
    events.OPEN_OPTIONS: 'none',
    events.INITIAL_WEIGHTS: 'random',
}
_MAX_VALUE = 80  # maximum characters of a value quoted in a message
_MAX_SETTINGS = 5  # maximum settings, parts and files named in a message


def _known_fact(run: Run, name: str) -> Any:
    """Return a fact from the log or a description, or None if only a default is known."""
    is_known = name not in _FACT_KEYS or any(key in run.lines for key in _FACT_KEYS[name])
    return run.fact(name) if is_known else None


def _that_count(runs: Iterable[Run]) -> list[Run]:
    """Return the converged and running runs, or all readable ones if there are none."""
    readable = [r for r in runs if r.status != 'unreadable']
    return [r for r in readable if r.status in ('converged', 'running')] or readable


def find_differences(runs: Sequence[Run]) -> str | None:
    """Return a message about the facts that must be equal in all runs but differ, or None.

    Means leave resumed runs out if others converged, so a resume may have changed _ELASTIC facts.
    """
    has_whole = any(r.status == 'converged' and not r.num_resumes for r in runs)
    readable = [r for r in runs if r.status != 'unreadable']
    texts = []
    for name in (*_SHARED_IF_COUNTED, *_SHARED):
        members = _that_count(runs) if name in _SHARED_IF_COUNTED else readable
        if has_whole and name in _ELASTIC:
            members = [r for r in members if not r.num_resumes]
        known = [(r, value) for r in members if (value := _known_fact(r, name)) is not None]
        other = next(((r, value) for r, value in known if value != known[0][1]), None)
        if other:
            places = [
                f'{str(value)[:_MAX_VALUE]} in {r.path.name}' for r, value in (known[0], other)
            ]
            texts.append(f'{name} is {" and ".join(places)}')
    if not texts:
        return None
    return f'{"; ".join(texts)}, expected one value in a run set; report the runs separately'


def _unlogged(run: Run) -> dict[str, str]:
    """Return the settings that this program does not log, once a run has begun."""
    return _UNLOGGED if keys.RUN_START in run.lines else {}


def find_parts(
    runs: Iterable[Run], facts: Sequence[str] = (*_SHARED_IF_COUNTED, 'division')
) -> str | None:
    """Return the parts of a set whose runs differ in settings or facts, as text, or None if all are
    equal."""
    settings = {
        r.path.name: {**_unlogged(r), **{n: r.fact(n) for n in facts}, **r.optimizer, **r.options}
        for r in runs
        if r.status != 'unreadable'
    }
    known = dict.fromkeys(name for each in settings.values() for name in each)
    names = [n for n in known if len({each.get(n) for each in settings.values()} - {None}) > 1][
        :_MAX_SETTINGS
    ]
    parts = grouped(
        settings,
        lambda file: ', '.join(f'{n} {str(settings[file].get(n))[:_MAX_VALUE]}' for n in names),
    )
    texts = [f'{text} in {some(files, _MAX_SETTINGS)}' for text, files in parts.items()]
    return '; '.join(texts[:_MAX_SETTINGS]) if names else None


def find_submitters(runs: Sequence[Run]) -> list[Finding]:
    """Return a warning if the logs of a set contain several submitters."""
    named = grouped((r for r in runs if r.org), lambda r: normalized(str(r.org)))
    if len(named) < 2:
        return []
    texts = [f'{str(r.org)[:_MAX_VALUE]!r} in {r.path.name}' for r, *_ in islice(named.values(), 3)]
    return [make_finding('submitters_differ', None, len(named), ', '.join(texts))]


def folded(texts_by_log: Mapping[Path, Iterable[str]]) -> list[str]:
    """Return each text once, with the name of its log or the number of its logs if there are
    several logs."""
    logs: dict[str, list[Path]] = {}
    for path, texts in texts_by_log.items():
        for text in dict.fromkeys(texts):
            logs.setdefault(text, []).append(path)
    if len(texts_by_log) == 1:
        return list(logs)
    lines = []
    for text, paths in sorted(logs.items(), key=lambda item: -len(item[1])):
        where = paths[0].name if len(paths) == 1 else f'{len(paths)} logs'
        lines.append(f'{where}: {text}')
    return lines


def violations_of(logs: Iterable[CheckedLog], ruleset: str) -> dict[Path, tuple[str, ...]]:
    """Return how logs break a ruleset, except those of running runs and of logs without a run.

    A log with lines only of other formats breaks it, because nothing in it can follow its rules.
    """
    finished = [log for log in logs if log.run and log.run.status != 'running' and log.rulesets]
    foreign = (f'no line in the format of {ROUND_OF[ruleset]}',)
    results = {
        log.path: log.result(ruleset).violations if ruleset in log.rulesets else foreign
        for log in finished
    }
    return {path: violations for path, violations in results.items() if violations}


def allowed_misses(num_runs: int) -> int:
    """Return how many logs may break the rules, or belong to runs that did not converge."""
    return int(num_runs == RUNS_OF_A_SCORE)


def passed_rulesets(logs: Sequence[CheckedLog]) -> Iterator[str]:
    """Yield the rulesets that logs pass, the oldest first."""
    known = {r for log in logs for r in log.rulesets}
    yield from (
        r
        for r in RULESETS
        if r in known and len(violations_of(logs, r)) <= allowed_misses(len(logs))
    )


def _choose_ruleset(run_set: RunSet, logs: Sequence[CheckedLog]) -> tuple[str | None, str]:
    """Return the ruleset of the logs' round, else the oldest that they pass, else the newest; and
    which one it is."""
    known = [r for r in RULESETS if any(r in log.rulesets for log in logs)]
    named = ROUNDS.get(run_set.round)
    if named in known:
        return named, ''
    if len(known) < 2:
        return next(iter(known), None), ''
    common = [r for r in known if all(r in log.rulesets for log in logs if log.rulesets)]
    passed = (r for r in passed_rulesets(logs) if r in common)
    oldest = next(passed, None) or next(passed_rulesets(logs), None)
    if oldest:
        return oldest, 'the oldest that the logs pass'
    return known[-1], 'the newest, because the logs pass none'


def _set_rules(run_set: RunSet, division: str | None) -> Iterator[str]:
    """Yield the rules for a result of five runs that a set breaks."""
    divisions = {str(r.division) for r in run_set.runs if r.status != 'unreadable'}
    if division:
        divisions = {division}
    if len(divisions) > 1:
        yield f'got the divisions {", ".join(sorted(divisions))}, expected one'
    if keys.CLOSED in divisions and any(r.other_dataset for r in run_set.runs):
        yield 'the closed division requires ImageNet, but these logs are of a different data set'
    seeds = [r.seed for r in run_set.runs if r.seed is not None]
    if len(set(seeds)) < len(seeds):
        yield 'some runs have the same seed, expected a different one for each run'
    if parts := find_parts(_that_count(run_set.runs), ()):
        yield f'the runs have different settings: {parts}'


def _too_many(
    run_set: RunSet,
    broken: Mapping[Path, tuple[str, ...]],
    misses: Mapping[Path, str],
    stated: Mapping[Path, Sequence[str]],
) -> Iterator[str]:
    """Yield the reasons why more logs than allowed break the rules or belong to runs that did not
    converge.

    stated: violations by log that are stated anyway.
    """
    allowed = allowed_misses(len(run_set.runs))
    failed = [r for r in run_set.runs if r.path in misses and r.status != 'converged']
    if allowed and len(failed) > allowed:
        named = ', '.join(f'{r.path.name} ({r.status})' for r in failed)
        yield f'got {len(failed)} failed runs, expected at most one: {named}'
    if len(misses if allowed else broken) > allowed:
        yield from folded(
            {
                r.path: [text for text in broken.get(r.path, ()) if text not in stated[r.path]]
                for r in run_set.runs
            }
        )
        yield from (
            f'{r.path.name}: did not converge ({r.status})'
            for r in failed
            if allowed and len(failed) == allowed and r.path not in broken
        )


def _obstacles(run_set: RunSet) -> Iterator[str]:
    """Yield the reasons why a set that breaks no rule cannot be submitted."""
    runs = run_set.runs
    yield from sorted({r.data_text for r in runs if r.data_text})
    if any(r.num_resumes for r in runs):
        yield 'resumed'
    states = {r.status for r in runs} - {'converged'}
    yield from sorted(states if len(runs) != RUNS_OF_A_SCORE else states & {'running'})
    if 1 < len(runs) != RUNS_OF_A_SCORE:
        yield f'{len(runs)} runs, expected {RUNS_OF_A_SCORE}'


def lacks_epochs(run_set: RunSet, ruleset: str) -> str:
    """Return how a set of the closed division took fewer epochs than a round credits, else ''."""
    division = run_set.logs[0].division if run_set.logs else None
    if (division or run_set.division) != keys.CLOSED:
        return ''
    # violations of the judged round do not count in this one
    missed = (r for r in run_set.runs if r.status not in ('converged', 'running'))
    misses: dict[Path, str] = {r.path: r.status for r in missed}
    misses |= {path: texts[0] for path, texts in violations_of(run_set.logs, ruleset).items()}
    judged = replace(run_set.judgement, ruleset=ruleset, violations=(), misses=misses)
    points = check_rcp(replace(run_set, judgement=judged))
    if not points or not points.is_of_round or points.passed:
        return ''
    return f'epochs to converge: {points.text}'


def _is_cut(run: Run, finding: Finding) -> bool:
    """Return whether an error is no contradiction, because the run was killed, also before its
    clock started."""
    is_open = keys.RUN_STOP not in run.lines
    return finding.kind == 'no_run_stop' or finding.kind == 'no_run_start' and is_open


def judge_set(run_set: RunSet) -> RunSet:
    """Return a set with its judgement. No ruleset is applied to logs that have none, or if the
    checkers are missing."""
    runs, logs = run_set.runs, run_set.logs
    try:
        ruleset, basis = _choose_ruleset(run_set, logs)
        broken = violations_of(logs, ruleset) if ruleset else {}
    except NotInstalled:
        ruleset, basis, broken = None, '', {}
    errors = {
        r.path: [f.text for f in r.findings if f.grade == 'error' and not _is_cut(r, f)]
        for r in runs
    }
    # why finished runs do not count as converged
    misses = {
        r.path: r.status if r.status != 'converged' else f'breaks the rules: {broken[r.path][0]}'
        for r in runs
        if r.path in broken or r.status not in ('converged', 'running')
    }
    division = logs[0].division if logs else None
    general = [run_set.refusal] if run_set.refusal else []
    general += [*folded(errors), *(d.text for d in run_set.duplicates)]
    obstacles = list(_obstacles(run_set))
    is_result = len(runs) == RUNS_OF_A_SCORE
    (general if is_result else obstacles).extend(_set_rules(run_set, division))
    allowed = allowed_misses(len(runs))
    is_unchecked = ruleset is None and any(log.rulesets for log in logs)
    num_failed = sum(r.status not in ('converged', 'running') for r in runs)
    is_sound = not general and not (is_result and num_failed > allowed)
    judgement = Judgement(
        ruleset,
        basis,
        is_sound=is_sound,
        is_unchecked=is_unchecked,
        obstacles=tuple(obstacles),
        misses=misses,
    )
    violations = [*general, *_too_many(run_set, broken, misses, errors)]
    # even a log that does not count is submitted
    if ruleset and allowed == 1 and len(broken) == 1:
        violations += [
            f'{path.name}: {danger}' for path in broken if (danger := find_danger(path, ruleset))
        ]
    if ruleset and (text := lacks_epochs(replace(run_set, judgement=judgement), ruleset)):
        judgement = replace(judgement, convergence=text)
        violations.append(text)
    return replace(
        run_set, judgement=replace(judgement, violations=tuple(dict.fromkeys(violations)))
    )
