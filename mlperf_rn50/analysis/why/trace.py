"""Traced steps of all ranks: reading of untrusted files, alignment of clocks, and the Chrome trace format."""
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import astuple

from mlperf_rn50.analysis.why.load import WhyRun
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import write_atomically, writing_folder
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import RanksRecord, StepSpans
from mlperf_rn50.text import plural, printable, short

# Phases of a step in their order, as texts for people.
PHASES = ('Python', 'input', 'forward and backward', 'waiting for the slowest rank', 'exchange', 'update')
HOW_TO_TRACE = 'train with --run.trace 20@100 to trace the steps of each rank'
_MAX_RANKS, _MAX_STEPS, _MAX_BUCKETS = 1024, 10_000, 999
Steps = Mapping[int, Sequence['TracedStep']]  # by rank


class TracedStep(NamedTuple):
    step: int
    times: Sequence[float]  # start, and end of each phase, in seconds on the clock of the first rank
    buckets: Sequence[Sequence[float]]  # when each was ready on this rank, ready on the last rank, and exchanged


def align(traces: Mapping[int, Sequence[StepSpans]]) -> tuple[Steps, float]:
    """Return steps by rank, and the error of their clocks in seconds; omit ranks that share no step with the first.

    Exchanges end on all ranks at nearly the same time, so the offset of a clock is the median difference of these ends.
    The error is the largest 95th percentile of a rank's residuals. A constant delay does not show.
    """
    base = {s.step: s.exchanged_s for s in next(iter(traces.values()), ())}
    moved, error_s, last = dict[int, list[Any]](), 0.0, dict[int, list[float]]()
    for rank, spans in traces.items():
        if ahead := [s.exchanged_s - base[s.step] for s in spans if s.step in base]:
            by = float(np.median(ahead))
            error_s = max(error_s, float(np.quantile(np.abs(np.subtract(ahead, by)), 0.95)))
            moved[rank] = [(s.step, [t - by for t in astuple(s)[1:-1]], [(a - by, b - by) for a, b in s.buckets])
                           for s in spans]
    for step, times, buckets in chain(*moved.values()):  # when the last rank had computed all, and each bucket
        ready = zip_longest([times[3], *(a for a, _ in buckets)], last.get(step, ()), fillvalue=-np.inf)
        last[step] = [max(pair) for pair in ready]
    return {rank: [TracedStep(step, [*times[:4], min(last[step][0], times[4]), *times[4:]], [
        (a, min(sent, b), b) for (a, b), sent in zip(buckets, last[step][1:])]) for step, times, buckets in steps]
        for rank, steps in moved.items()}, error_s


def read_traces(run: RunFolder) -> tuple[Steps, float]:
    """Return the traced steps of each rank as align does, without those whose times are out of order."""
    traces = {}
    for rank in range(_MAX_RANKS):
        lines = islice(read_lines(run.trace(rank), StepSpans), _MAX_STEPS)
        if steps := [s for _, s in lines if len(s.buckets) <= _MAX_BUCKETS and all(
                a <= b for times in (astuple(s)[1:-1], *((s.start_s, *b, s.updated_s) for b in s.buckets))
                for a, b in pairwise(times))]:
            traces[rank] = steps
    return align(traces)


def host_names(records: Sequence[RanksRecord]) -> dict[int, str]:
    return {r.rank: short(printable(r.host), 24) for record in records for r in record.ranks}


def _events(steps: Steps, hosts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield a process per host, and a thread per rank and per bucket of a rank, because buckets overlap."""
    names = {rank: hosts.get(rank, 'unknown host') for rank in steps}
    pids = {host: pid for pid, host in enumerate(dict.fromkeys(names.values()), 1)}  # 0 is Perfetto's idle task
    for rank, spans in steps.items():
        pid, first = pids[names[rank]], rank * (_MAX_BUCKETS + 1) + 1
        yield {'ph': 'M', 'name': 'process_name', 'pid': pid, 'tid': first, 'args': {'name': names[rank]}}
        for k in range(1 + max(len(s.buckets) for s in spans)):
            name = f'rank {rank}' + f' bucket {k - 1}' * bool(k)
            yield {'ph': 'M', 'name': 'thread_name', 'pid': pid, 'tid': first + k, 'args': {'name': name}}
        for s in spans:
            blocks = [(0, f'step {s.step}', (s.times[0], s.times[-1])), *zip([0] * 6, PHASES, pairwise(s.times)),
                      *((k, *b) for k, bucket in enumerate(s.buckets, 1) for b in zip(PHASES[3:5], pairwise(bucket)))]
            for k, name, ends in blocks:
                start, end = (round(1e6 * t, 3) for t in ends)  # before the difference, so that no blocks overlap
                yield {'ph': 'X', 'name': name, 'pid': pid, 'tid': first + k, 'ts': start, 'dur': round(end - start, 3)}


def write_perfetto(run: WhyRun, path: Path) -> str:
    """Write the traced steps and return a sentence about them. Raise ConfigError if there are none, or on failure."""
    steps, error_s = read_traces(run.folder)
    if not steps:
        raise ConfigError(f'--perfetto: got no {run.folder.trace(0)}, expected traced steps; {HOW_TO_TRACE}')
    with writing_folder(path.parent, '--perfetto'):
        write_atomically(path, json.dumps({'traceEvents': [*_events(steps, host_names(run.all(RanksRecord)))]}))
    return (f'{path}: {plural(max(map(len, steps.values())), "step")} of {plural(len(steps), "rank")}; the clocks are '
            f'aligned by the ends of exchanges, with an error of {1e3 * error_s:.2f} ms (95th percentile)')
