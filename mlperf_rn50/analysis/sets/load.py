"""Find logs, and group them into judged run sets."""

import os
import re
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.judgement import (
    find_differences,
    find_parts,
    find_submitters,
    judge_set,
)
from mlperf_rn50.analysis.sets.published import sets_under
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.show.bar import track
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.judge import CheckedLog, check_log
from mlperf_rn50.mllog.duplicates import Duplicate, find_duplicates
from mlperf_rn50.mllog.findings import Finding, make_finding, most_severe
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.reader import NOT_TRAINING, OtherBenchmark, find_logs, no_logs, read_run
from mlperf_rn50.runfolder.names import LOG, PACKED_LOG, run_number
from mlperf_rn50.system.signals import end_with_parent
from mlperf_rn50.text import grouped, plural, some

_COUNTS = ('num_nodes', 'num_ranks', 'num_accelerators')
_MIN_KEPT = 0.8  # minimum share of the lines of ranks that remains if they interleave
_FILTERS = {
    'round': 'rounds',
    'org': 'org',
    'accelerator': 'accelerator',
    'batch': 'global_batch_size',
    'nodes': 'num_nodes',
}  # option: fact
_MAX_CHOICES = 60  # maximum values listed in the error for a filter that selects nothing
_MAX_NAMES = 10  # maximum benchmarks named in the line about skipped logs
_MANY, _MAX_PROCESSES = 64, 8  # more than _MANY logs are read by several processes


def _is_packed(log: Path) -> bool:
    return re.fullmatch(PACKED_LOG, log.name) is not None


def _why_empty(path: Path, errors: Sequence[OSError]) -> str:
    if sets_under(path):
        return 'packaged sets have no logs, so use mlperf-rn50 report'
    if not os.path.lexists(path):
        return 'no such folder'
    return 'neither a file nor a folder' if errors else no_logs(path)


def list_logs(paths: Sequence[Path]) -> tuple[list[list[Path]], list[OSError]]:
    """Return the logs of each folder, and the errors of unreadable folders. Raise UserError for
    paths without logs.

    Logs with other names than result_<k>.txt are a group of their own.
    """
    found: dict[Path, None] = {}  # an ordered set of logs
    faults: dict[str, OSError] = {}
    refused = []
    for path in paths:
        is_log = (
            run_number(path.name) is not None and os.path.lexists(path) and not os.path.isdir(path)
        )
        logs, errors = [path], list[OSError]()
        if not is_log and not os.path.isfile(path):
            logs, errors = find_logs(path, f'{LOG}|{PACKED_LOG}')
        logs = [p for p in logs if not _is_packed(p) or p.with_suffix('') not in logs]
        if not logs and all(isinstance(e, (FileNotFoundError, NotADirectoryError)) for e in errors):
            refused.append(f'{path}: {_why_empty(path, errors)}')
        found.update(dict.fromkeys(logs))
        faults.update((e.filename, e) for e in errors)
    if refused:
        raise UserError(f'{"; ".join(refused)}; expected a log or a folder of logs')
    folders = grouped(found, lambda p: (p.parent, run_number(p.name) is None and not _is_packed(p)))
    ordered = [sorted(logs, key=lambda p: (len(p.name), p.name)) for logs in folders.values()]
    return ordered, list(faults.values())


@dataclass(frozen=True)
class Rules:
    """Rules by which logs are judged."""

    rulesets: Sequence[str] | None = None  # None for those of their line formats
    division: str | None = None  # None for the logged one
    now_s: float | None = None  # time of the judgement in seconds since 1970, None for the present


def load_folder(
    paths: Sequence[Path], rules: Rules | None
) -> tuple[RunSet | None, list[OtherBenchmark]]:
    """Return the judged set of a folder's logs, and the logs that are left out.

    Those of programs that train nothing are left out and, if no other can be read, those of other
    benchmarks. There is no set without a log.
    """
    logs, foreign, of_others = [], [], []
    for path in paths:
        try:
            logs.append(
                check_log(path, rules.rulesets, rules.division, rules.now_s)
                if rules
                else CheckedLog(path, read_run(path))
            )
        except UserError as e:
            if isinstance(e, OtherBenchmark):
                foreign.append(e)
                of_others.append(path)
                if e.benchmark in NOT_TRAINING:
                    continue
            logs.append(CheckedLog(path, error=str(e).removeprefix(f'{path}: ')))
    if foreign and not any(log.run for log in logs):
        logs = [log for log in logs if log.path not in of_others]
        return make_run_set(paths[0].parent, logs) if logs else None, foreign
    omitted = [e for e in foreign if e.benchmark in NOT_TRAINING]
    return make_run_set(paths[0].parent, logs), omitted


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _follow_parent() -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent ends, even if the parent is
    killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)


def load_folders(
    folders: Sequence[Sequence[Path]], rules: Rules | None
) -> list[tuple[RunSet | None, list[OtherBenchmark]]]:
    """Return the sets of folders of logs in the same order. Several processes read a large number
    of logs."""
    num_processes = min(_num_processors(), _MAX_PROCESSES)
    all_rules = [rules] * len(folders)
    is_large = sum(map(len, folders)) > _MANY and num_processes > 1
    if is_large and threading.active_count() == 1:  # threads do not survive a fork
        with (
            suppress(BrokenExecutor, OSError),  # a worker was killed or cannot be started
            ProcessPoolExecutor(num_processes, initializer=_follow_parent) as pool,
        ):
            return list(track(pool.map(load_folder, folders, all_rules), len(folders), 'read logs'))
    return list(track(map(load_folder, folders, all_rules), len(folders), 'read logs'))


def _settle(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs. One with contradictory counts, or with lost lines of ranks, gets the count
    of most runs."""
    settled = tuple(runs)
    for name in _COUNTS:
        known = Counter(v for r in runs if (v := r.fact(name)) is not None)
        for agreed, num_runs in known.items():
            if num_runs > max(1, known.total() / 2):
                settled = tuple(_with_count(run, name, agreed, num_runs) for run in settled)
    return settled


def _with_count(run: Run, name: str, agreed: int, num_runs: int) -> Run:
    """Return a run with the count of most runs of its set, if its own may be wrong."""
    source, value = run.sources.get(name), run.fact(name)
    if value in (None, agreed) or not source or source.basis == 'logged':
        return run
    least = agreed if name == 'num_nodes' else _MIN_KEPT * agreed
    if not any(n == agreed or least < n < agreed for n in source.numbers):
        return run
    settling = make_finding(
        'count_settled', source.line, name, value, source.text, agreed, num_runs, file=run.path
    )
    found = [f._replace(text=f.text.removesuffix(f'; {value} is used')) for f in run.findings]
    used = replace(source, basis='implied', text='other logs of the set', line=None, path=None)
    batch = run.global_batch_size
    batch_source = run.sources.get(keys.GLOBAL_BATCH_SIZE)
    if batch and batch_source and batch_source.text.endswith(f' x {name}'):
        batch = round(batch * agreed / value)
    changes: dict[str, Any] = {
        'global_batch_size': batch,
        'sources': {**run.sources, name: used},
        'findings': tuple(most_severe([*found, settling])),
        name: agreed,
    }
    return replace(run, **changes)


def _mark_duplicates(run_sets: Sequence[RunSet]) -> list[RunSet]:
    """Return the sets. One with logs of an earlier set has a finding, one with no others breaks a
    rule; a copy from another round joins its `later`."""
    set_of = {id(r): s for s in run_sets for r in s.runs}
    copies = {s: dict[RunSet, list[Duplicate]]() for s in run_sets}  # by their original set
    for duplicate in find_duplicates([r for s in run_sets for r in s.runs]):
        run_set, original = set_of[id(duplicate.run)], set_of[id(duplicate.original)]
        if run_set is not original:
            copies[run_set].setdefault(original, []).append(duplicate)
    marked = dict[RunSet, RunSet]()
    later = defaultdict[RunSet, list[RunSet]](list)
    for run_set, found in copies.items():
        is_duplicate = sum(map(len, found.values())) == len(run_set.runs)
        others = [s for s in found if is_duplicate and s.round != run_set.round]
        if len(found) == 1 and others:
            later[others[0]].append(run_set)
            continue
        flags = [_flag_duplicates(run_set, s, duplicates) for s, duplicates in found.items()]
        if is_duplicate:
            violations = (*run_set.judgement.violations, *(flag.text for flag in flags))
            judgement = replace(run_set.judgement, violations=violations, is_sound=False)
            marked[run_set] = replace(run_set, judgement=judgement, is_duplicate=True)
        else:
            marked[run_set] = replace(run_set, findings=(*run_set.findings, *flags))
    return [replace(s, later=tuple(later[original])) for original, s in marked.items()]


def _flag_duplicates(run_set: RunSet, other: RunSet, duplicates: Sequence[Duplicate]) -> Finding:
    """Return a warning, or a note if all logs of a set were submitted again in another round."""
    name = other.name if other.name != run_set.name else str(other.folder)
    if len(duplicates) == 1:
        log, original = duplicates[0].run.path, duplicates[0].original.path
        return make_finding('duplicate_elsewhere', None, log.name, original.name, name, file=log)
    is_whole = len(duplicates) == len(run_set.runs)
    count = 'all' if is_whole else f'{len(duplicates)} of'
    found = make_finding('duplicates_elsewhere', None, count, len(run_set.runs), name)
    is_again = is_whole and run_set.round != other.round
    return found._replace(grade='note') if is_again else found


def _unreadable(log: CheckedLog) -> Run:
    finding = make_finding('unreadable', None, log.error, file=log.path)
    return Run(log.path, 'unknown', 'unreadable', findings=(finding,))


def make_run_set(folder: Path, logs: Sequence[CheckedLog], fault: str | None = None) -> RunSet:
    """Return the judged set of a folder, whose fault is why it cannot be read.

    A log that cannot be read, or is of another benchmark, is an unreadable run.
    """
    runs = _settle([log.run or _unreadable(log) for log in logs])
    home = folder.absolute()
    # a submission has <system>/resnet/result_<k>.txt
    home = home.parent if home.name == 'resnet' else home
    refusal = fault or find_differences(runs)
    return judge_set(
        RunSet(
            name=home.name,
            folder=folder,
            study=home.parent,
            runs=runs,
            refusal=refusal,
            findings=tuple(find_submitters(runs)),
            parts_text=None if refusal else find_parts(runs),
            logs=tuple(logs),
        )
    )


def load_logs(
    paths: Sequence[Path], rules: Rules | None
) -> tuple[list[RunSet], list[OtherBenchmark]]:
    """Return the judged run sets of all ResNet logs under the paths, and the logs of other
    benchmarks.

    The sets are ordered by study and then by size. Folders that cannot be read, or whose runs
    differ in a setting that all runs of a set must share, become refused sets. Logs that were
    submitted again in a later round are one set. Raise UserError if a path contains no log, or if
    no log can be read. Without rules, no ruleset is applied.
    """
    found, faults = list_logs(paths)
    run_sets = [
        make_run_set(Path(e.filename), [CheckedLog(Path(e.filename), error=reason)], reason)
        for e in faults
        for reason in [f'the folder cannot be read: {e.strerror}']
    ]
    loaded = load_folders(found, rules)
    others = [log for _, foreign in loaded for log in foreign]
    run_sets += [run_set for run_set, _ in loaded if run_set]
    if not run_sets:
        more = f'; {describe_others(others)}' if len(others) > 1 else ''
        raise OtherBenchmark(f'{others[0]}{more}')
    if all(r.status == 'unreadable' for s in run_sets for r in s.runs) and not faults:
        run = run_sets[0].runs[0]
        raise UserError(f'{run.path}: {run.findings[0].text}')
    run_sets.sort(key=lambda s: (str(s.study), s.num_units or 0, s.num_nodes or 0, s.name))
    order = {s.runs[0].path: number for number, s in enumerate(run_sets)}
    by_round = sorted(run_sets, key=lambda s: s.round)
    return sorted(_mark_duplicates(by_round), key=lambda s: order[s.runs[0].path]), others


def load_run_sets(paths: Sequence[Path], rules: Rules | None = None) -> list[RunSet]:
    """Return the run sets of load_logs."""
    return load_logs(paths, rules)[0]


def describe_others(others: Sequence[OtherBenchmark]) -> str:
    """Return the line about skipped logs of other benchmarks, or ''."""
    if not others:
        return ''
    names = list(dict.fromkeys(log.benchmark for log in others))
    return f'skipped {plural(len(others), "log")} of other benchmarks: {some(names, _MAX_NAMES)}'


def filter_sets(run_sets: Sequence[RunSet], options: Mapping[str, Any]) -> Sequence[RunSet]:
    """Return the run sets that all options in _FILTERS select. Raise UserError for an option that
    selects none."""
    for name, fact in _FILTERS.items():
        wanted = options.get(name)
        if wanted is None:
            continue
        is_part = name in ('org', 'accelerator')
        values = [v if isinstance(v := getattr(s, fact), tuple) else (v,) for s in run_sets]
        found = sorted({v for each in values for v in each if v is not None})
        chosen = {v for v in found if v == wanted or is_part and wanted.casefold() in v.casefold()}
        run_sets = [s for s, each in zip(run_sets, values) if chosen & set(each)]
        if not run_sets:
            known = f'expected one of: {some(found, _MAX_CHOICES)}'
            if not found:
                known = 'but no log has a value; omit it'
            raise UserError(f'--{name}: got {wanted}, {known}')
    return run_sets
