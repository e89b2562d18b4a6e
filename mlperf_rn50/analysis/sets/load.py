"""Find logs and group them into run sets. A set whose runs differ in a fact that they must share is refused."""
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.progress import track
from mlperf_rn50.analysis.sets.published import sets_under
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.duplicates import Duplicate, find_duplicates
from mlperf_rn50.mllog.findings import Finding, make_finding, most_severe
from mlperf_rn50.mllog.read.reader import OtherBenchmark, find_logs, no_logs, read_run
from mlperf_rn50.mllog.run import Run
from mlperf_rn50.runfolder.names import LOG
from mlperf_rn50.system.signals import end_with_parent
from mlperf_rn50.text import grouped, some

# Facts that all runs of a set must share, and those that only converged and running ones must share.
_SHARED = ('target_accuracy', 'num_nodes', 'num_accelerators', 'accelerator', 'dataset', 'round', 'is_imagenet',
           'train_samples', 'eval_samples')
_SHARED_IF_COUNTED = ('global_batch_size', 'opt_name')
_COUNTS = ('num_nodes', 'num_ranks', 'num_accelerators')
_MIN_KEPT = 0.8  # minimum share of the lines of ranks that remains if they interleave
# Facts whose default comes from the rules or from ImageNet. They are known only if the log contains one of these keys.
_FACT_KEYS = {'is_imagenet': (keys.TRAIN_SAMPLES, 'dataset'), 'train_samples': (keys.TRAIN_SAMPLES,),
              'eval_samples': (keys.EVAL_SAMPLES,)}
_MAX_VALUE = 80  # maximum characters of a value quoted in a message
_FILTERS = {'round': 'rounds', 'org': 'org', 'accelerator': 'accelerator', 'batch': 'global_batch_size',
            'nodes': 'num_nodes'}  # option: fact
_MAX_CHOICES = 60  # maximum values listed in the error for a filter that selects nothing
_MAX_SETTINGS = 5  # maximum settings, parts and files named in a message
# More than _MANY logs are read by several processes, in chunks of _AT_ONCE.
_MANY, _AT_ONCE, _MAX_PROCESSES = 64, 32, 8


def list_logs(paths: Sequence[Path]) -> tuple[dict[Path, list[Path]], list[OSError]]:
    """Return logs by folder, and the errors of unreadable folders. Raise UserError for paths without logs."""
    found: dict[Path, None] = {}  # an ordered set of logs
    faults: dict[str, OSError] = {}
    refused = []
    for path in paths:
        logs, errors = ([path], []) if os.path.isfile(path) else find_logs(path, LOG)
        if not logs and all(isinstance(e, (FileNotFoundError, NotADirectoryError)) for e in errors):
            reason = ('packaged sets have no logs, so use mlperf-rn50 report' if sets_under(path) else
                      'no such folder' if not os.path.lexists(path) else 'neither a file nor a folder' if errors else
                      no_logs(path))
            refused.append(f'{path}: {reason}')
        found.update(dict.fromkeys(logs))
        faults.update((e.filename, e) for e in errors)
    if refused:
        raise UserError(f'{"; ".join(refused)}; expected a log or a folder of logs')
    folders = {folder: sorted(logs, key=lambda p: (len(p.name), p.name))
               for folder, logs in grouped(found, lambda p: p.parent).items()}
    return folders, list(faults.values())


def _load_run(path: Path) -> Run | UserError:
    """Return the run of a log, or the reason why the log cannot be read."""
    try:
        return read_run(path)
    except UserError as e:
        return e


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _follow_parent() -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent ends, even if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)


def _load_runs(logs: Sequence[Path]) -> list[Run | UserError]:
    """Return the runs of logs in the same order. Several processes read a large number of logs."""
    num_processes = min(_num_processors(), _MAX_PROCESSES)
    if len(logs) > _MANY and num_processes > 1 and threading.active_count() == 1:  # threads do not survive a fork
        with (suppress(BrokenExecutor, OSError),  # a worker was killed or cannot be started
              ProcessPoolExecutor(num_processes, initializer=_follow_parent) as pool):
            return list(track(pool.map(_load_run, logs, chunksize=_AT_ONCE), len(logs), 'read logs'))
    return list(map(_load_run, logs))


def _settle(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs. One with contradictory counts, or with lost lines of ranks, gets the count of most runs."""
    settled = list(runs)
    for name in _COUNTS:
        known = Counter(v for r in runs if (v := r.fact(name)) is not None)
        for (k, run), agreed in product(enumerate(settled), (v for v in known if known[v] > max(1, known.total() / 2))):
            source, value = run.sources.get(name), run.fact(name)
            if value not in (None, agreed) and source and source.basis != 'logged' and any(
                    n == agreed or name != 'num_nodes' and _MIN_KEPT * agreed < n < agreed for n in source.numbers):
                settling = make_finding('count_settled', source.line, name, value, source.text, agreed, known[agreed],
                                        file=run.path)
                found = [f._replace(text=f.text.removesuffix(f'; {value} is used')) for f in run.findings]
                used = replace(source, basis='implied', text='other logs of the set', line=None, path=None)
                batch_source = run.sources.get(keys.GLOBAL_BATCH_SIZE)
                factor = agreed / value if batch_source and batch_source.text.endswith(f' x {name}') else 1
                settled[k] = replace(run, **{name: agreed}, sources={**run.sources, name: used},
                                     global_batch_size=run.global_batch_size and round(run.global_batch_size * factor),
                                     findings=tuple(most_severe([*found, settling])))
    return tuple(settled)


def _known_fact(run: Run, name: str) -> Any:
    """Return a fact from the log or a description, or None if only a default is known."""
    is_known = name not in _FACT_KEYS or any(key in run.lines for key in _FACT_KEYS[name])
    return run.fact(name) if is_known else None


def _find_difference(runs: Sequence[Run]) -> str | None:
    """Return a message about the first fact that must be equal in all runs but differs, or None."""
    runs = [r for r in runs if r.status != 'unreadable']
    counted = [r for r in runs if r.status in ('converged', 'running')] or runs
    for name in (*_SHARED_IF_COUNTED, *_SHARED):
        members = counted if name in _SHARED_IF_COUNTED else runs
        known = [(r, value) for r in members if (value := _known_fact(r, name)) is not None]
        other = next(((r, value) for r, value in known if value != known[0][1]), None)
        if other:
            first, second = (f'{str(value)[:_MAX_VALUE]} in {r.path.name}' for r, value in (known[0], other))
            return f'{name} is {first} and {second}, expected one value in a run set; report the runs separately'
    return None


def _find_parts(runs: Sequence[Run]) -> str | None:
    """Return the parts of a set whose runs have different settings, as text, or None if all are equal."""
    settings = {r.path.name: {**{name: r.fact(name) for name in (*_SHARED_IF_COUNTED, 'division')}, **r.optimizer}
                for r in runs if r.status != 'unreadable'}
    known = dict.fromkeys(name for each in settings.values() for name in each)
    names = [n for n in known if len({each.get(n) for each in settings.values()} - {None}) > 1][:_MAX_SETTINGS]
    parts = grouped(settings, lambda file: ', '.join(f'{n} {str(settings[file].get(n))[:_MAX_VALUE]}' for n in names))
    texts = [f'{text} in {some(files, _MAX_SETTINGS)}' for text, files in parts.items()]
    return '; '.join(texts[:_MAX_SETTINGS]) if names else None


def _find_submitters(runs: Sequence[Run]) -> list[Finding]:
    """Return a warning if the logs of a set contain several submitters."""
    named = grouped((r for r in runs if r.org), lambda r: ''.join(c for c in str(r.org).casefold() if c.isalnum()))
    texts = [f'{str(r.org)[:_MAX_VALUE]!r} in {r.path.name}' for r, *_ in islice(named.values(), 3)]
    return [make_finding('submitters_differ', None, len(named), ', '.join(texts))] if len(named) > 1 else []


def _mark_duplicates(run_sets: Sequence[RunSet]) -> list[RunSet]:
    """Return the sets. One with logs of an earlier set has a finding; a copy from another round joins its `later`."""
    indices = {id(r): i for i, s in enumerate(run_sets) for r in s.runs}
    found: dict[int, dict[int, list[Duplicate]]] = {i: {} for i in range(len(run_sets))}
    for duplicate in find_duplicates([r for s in run_sets for r in s.runs]):
        index, other = indices[id(duplicate.run)], indices[id(duplicate.original)]
        if index != other:
            found[index].setdefault(other, []).append(duplicate)
    marked = [replace(s, findings=(*s.findings, *(_flag_duplicates(s, run_sets[i], d) for i, d in found[k].items())),
                      is_duplicate=sum(map(len, found[k].values())) == len(s.runs)) for k, s in enumerate(run_sets)]
    first = {k: i for k, s in enumerate(marked) for i in found[k]
             if s.is_duplicate and len(found[k]) == 1 and s.round != run_sets[i].round}
    later = [tuple(run_sets[k] for k in first if first[k] == i) for i in range(len(run_sets))]
    return [replace(s, later=again) for k, (s, again) in enumerate(zip(marked, later)) if k not in first]


def _flag_duplicates(run_set: RunSet, other: RunSet, duplicates: Sequence[Duplicate]) -> Finding:
    """Return a warning, or a note if all logs of a set were submitted again in another round."""
    name = other.name if other.name != run_set.name else str(other.folder)
    if len(duplicates) == 1:
        first = duplicates[0]
        return make_finding('duplicate_elsewhere', None, first.run.path.name, first.original.path.name, name,
                            file=first.run.path)
    is_again = len(duplicates) == len(run_set.runs) and run_set.round != other.round
    count = 'all' if len(duplicates) == len(run_set.runs) else f'{len(duplicates)} of'
    return make_finding('duplicates_elsewhere', None, count, len(run_set.runs), name,
                        grade='note' if is_again else None)


def make_run_set(folder: Path, logs: Sequence[Path], loaded: Sequence[Run | UserError]) -> RunSet:
    """Return the run set of a folder. A log that cannot be read, or is of another benchmark, is an unreadable run."""
    runs = _settle([x if isinstance(x, Run) else Run(log, 'unknown', 'unreadable', findings=(
        make_finding('unreadable', None, str(x).removeprefix(f'{log}: '), file=log),)) for log, x in zip(logs, loaded)])
    return _make_run_set(folder, runs, _find_difference(runs))


def _make_run_set(folder: Path, runs: tuple[Run, ...], refusal: str | None) -> RunSet:
    home = folder.absolute()
    home = home.parent if home.name == 'resnet' else home  # a submission has <system>/resnet/result_<k>.txt
    return RunSet(home.name, folder, home.parent, runs, refusal, tuple(_find_submitters(runs)),
                  None if refusal else _find_parts(runs))


def load_run_sets(paths: Sequence[Path]) -> list[RunSet]:
    """Return the run sets of all ResNet logs under the paths, ordered by study and then by size.

    Folders of other benchmarks are ignored. Folders that cannot be read, or whose runs differ in a setting that all
    runs of a set must share, become refused sets. Logs that were submitted again in a later round are one set. Raise
    UserError if a path contains no log, or if no log can be read.
    """
    found, faults = list_logs(paths)
    run_sets = [_make_run_set(Path(e.filename), (Run(Path(e.filename), 'unknown', 'unreadable'),),
                              f'the folder cannot be read: {e.strerror}') for e in faults]
    others: list[OtherBenchmark] = []
    loaded = iter(_load_runs([log for logs in found.values() for log in logs]))
    for folder, logs in found.items():
        runs = [next(loaded) for _ in logs]
        foreign = [x for x in runs if isinstance(x, OtherBenchmark)]
        if foreign and not any(isinstance(x, Run) for x in runs):
            others += foreign
        else:
            run_sets.append(make_run_set(folder, logs, runs))
    if not run_sets:
        raise others[0]
    if all(r.status == 'unreadable' for s in run_sets for r in s.runs) and not faults:
        run = run_sets[0].runs[0]
        raise UserError(f'{run.path}: {run.findings[0].text}')
    run_sets.sort(key=lambda s: (str(s.study), s.num_units or 0, s.num_nodes or 0, s.name))
    order = {s.folder: number for number, s in enumerate(run_sets)}
    return sorted(_mark_duplicates(sorted(run_sets, key=lambda s: s.round)), key=lambda s: order[s.folder])


def filter_sets(run_sets: Sequence[RunSet], options: Mapping[str, Any]) -> Sequence[RunSet]:
    """Return the run sets that all options in _FILTERS select. Raise UserError for an option that selects none."""
    for name, fact in ((n, fact) for n, fact in _FILTERS.items() if options.get(n) is not None):
        wanted, is_part = options[name], name in ('org', 'accelerator')
        values = [v if isinstance(v := getattr(s, fact), tuple) else (v,) for s in run_sets]
        found = sorted({v for each in values for v in each if v is not None})
        chosen = {v for v in found if v == wanted or is_part and wanted.casefold() in v.casefold()}
        run_sets = [s for s, each in zip(run_sets, values) if chosen & set(each)]
        if not run_sets:
            known = f'expected one of: {some(found, _MAX_CHOICES)}' if found else 'but no log has a value; omit it'
            raise UserError(f'--{name}: got {wanted}, {known}')
    return run_sets
