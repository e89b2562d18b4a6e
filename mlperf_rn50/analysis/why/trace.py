"""Traced steps of all ranks: reading of untrusted files, alignment of clocks, and the Chrome trace
format."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import astuple

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import replacing, writing_folder
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import RanksRecord, StepSpans
from mlperf_rn50.text import plural, printable, short, some

# Phases of a step in their order, as texts for people.
PHASES = (
    'Python',
    'input',
    'forward and backward',
    'waiting for the slowest rank',
    'exchange',
    'update',
)
HOW_TO_TRACE = 'train with --run.trace 20@100 to trace the steps of each rank'
_MAX_BUCKETS, MAX_BLOCKS = 999, 1_000_000  # of a step; of all ranks
Steps = Mapping[int, Sequence['TracedStep']]  # by rank


class TracedStep(NamedTuple):
    step: int
    # start, and end of each phase, in seconds on the clock of the first rank
    times: Sequence[float]
    # when each was ready on this rank, ready on the last rank, and exchanged
    buckets: Sequence[Sequence[float]]


class Traces(NamedTuple):
    steps: Steps
    error_s: float  # of the clocks
    note: str  # which steps are left out, after '; ', or ''


def align(traces: Mapping[int, Sequence[StepSpans]]) -> tuple[Steps, float]:
    """Return steps by rank, and the error of their clocks in seconds; omit ranks that share no step
    with the first.

    Exchanges end on all ranks at nearly the same time, so the offset of a clock is the median
    difference of these ends. The error is the largest 95th percentile of a rank's residuals. A
    constant delay does not show.
    """
    base = {s.step: s.exchanged_s for s in next(iter(traces.values()), ())}
    error_s = 0.0
    moved = dict[int, list[Any]]()  # by rank, the step, its times and buckets on the first clock
    for rank, spans in traces.items():
        if ahead := [s.exchanged_s - base[s.step] for s in spans if s.step in base]:
            by = float(np.median(ahead))
            error_s = max(error_s, float(np.quantile(np.abs(np.subtract(ahead, by)), 0.95)))
            moved[rank] = [
                (s.step, [t - by for t in _times(s)], [(a - by, b - by) for a, b in s.buckets])
                for s in spans
            ]
    # when the last rank had computed all, and each bucket
    last = dict[int, list[float]]()
    for step, times, buckets in chain(*moved.values()):
        computed = [times[3], *(ready for ready, _ in buckets)]
        pairs = zip_longest(computed, last.get(step, ()), fillvalue=-np.inf)
        last[step] = [max(pair) for pair in pairs]
    return {
        rank: [
            TracedStep(
                step,
                [*times[:4], min(last[step][0], times[4]), *times[4:]],
                [(a, min(sent, b), b) for (a, b), sent in zip(buckets, last[step][1:])],
            )
            for step, times, buckets in steps
        ]
        for rank, steps in moved.items()
    }, error_s


def _times(span: StepSpans) -> tuple[float, ...]:
    return astuple(span)[1:7]


def _read_steps(path: Path) -> Iterator[StepSpans]:
    """Yield the steps of a trace whose times are in order."""
    for _, s in read_lines(path, StepSpans):
        orders = (_times(s), *((s.start_s, *bucket, s.updated_s) for bucket in s.buckets))
        is_ordered = all(a <= b for times in orders for a, b in pairwise(times))
        if len(s.buckets) <= _MAX_BUCKETS and is_ordered:
            yield s


def read_traces(run: RunFolder) -> Traces:
    """Return the steps of the newest traced attempt as align does, at most MAX_BLOCKS blocks.

    A block is a phase, or the wait or exchange of a bucket. Each rank has an equal share of these
    for its first steps, and at least one step.
    """
    attempts = {}  # start of the traced attempt by rank
    for path in run.dir.glob(f'trace_{run.index}_*.jsonl'):
        match = re.fullmatch(r'trace_\d+_(0|[1-9]\d{0,5})\.jsonl', path.name)
        if match and (first := next(_read_steps(path), None)):
            attempts[int(match[1])] = first.attempt_s
    newest = max(attempts.values(), default=0.0)
    ranks = sorted(rank for rank, start_s in attempts.items() if start_s == newest)
    earlier = sorted(attempts.keys() - {*ranks})

    # The first steps of each rank, as far as there is room.
    traces, num_left, is_cut = dict[int, list[StepSpans]](), MAX_BLOCKS, False
    for rank in ranks:
        share = MAX_BLOCKS // len(ranks)
        for s in _read_steps(run.trace(rank)):
            num_blocks = len(PHASES) + 2 * len(s.buckets)
            share -= num_blocks
            if num_blocks > num_left or rank in traces and share < 0:
                is_cut = True
                break
            num_left -= num_blocks
            traces.setdefault(rank, []).append(s)
    note = ''
    if is_cut:
        note = (
            f'; later steps of {plural(len(ranks), "traced rank")} are left out, because at most '
            f'{MAX_BLOCKS:,} phases and exchanges of buckets are read'
        )
    if earlier:
        note += f'; traces of an earlier attempt are left out (rank {some(earlier, 10)})'
    return Traces(*align(traces), note)


def host_names(records: Sequence[RanksRecord]) -> dict[int, str]:
    return {r.rank: short(printable(r.host), 24) for record in records for r in record.ranks}


def _events(steps: Steps, hosts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield a process per host, and a thread per rank and per bucket of a rank, because buckets
    overlap."""
    names = {rank: hosts.get(rank, 'unknown host') for rank in steps}
    # 0 is Perfetto's idle task
    pids = {host: pid for pid, host in enumerate(dict.fromkeys(names.values()), 1)}
    for rank, spans in steps.items():
        first = rank * (_MAX_BUCKETS + 1) + 1
        own = {'pid': pids[names[rank]]}
        threads = [f'rank {rank}']
        threads += [f'rank {rank} bucket {k}' for k in range(max(len(s.buckets) for s in spans))]
        for kind, texts in (('process_name', [names[rank]]), ('thread_name', threads)):
            for tid, text in enumerate(texts, first):
                yield {'ph': 'M', 'name': kind, **own, 'tid': tid, 'args': {'name': text}}
        for s in spans:
            blocks = [(0, f'step {s.step}', (s.times[0], s.times[-1]))]
            blocks += [(0, *block) for block in zip(PHASES, pairwise(s.times))]
            for k, bucket in enumerate(s.buckets, 1):
                blocks += [(k, *block) for block in zip(PHASES[3:5], pairwise(bucket))]
            for k, name, ends in blocks:
                # before the difference, so that no blocks overlap
                start, end = (round(1e6 * t, 3) for t in ends)
                times = {'ts': start, 'dur': round(end - start, 3)}
                yield {'ph': 'X', 'name': name, **own, 'tid': first + k, **times}


def write_perfetto(run: RunData, path: Path) -> str:
    """Write the traced steps and return a sentence about them. Raise ConfigError if there are none,
    or on failure."""
    steps, error_s, note = read_traces(run.folder)
    if not steps:
        raise ConfigError(
            f'--perfetto: got no {run.folder.trace(0)}, expected traced steps; {HOW_TO_TRACE}'
        )
    with writing_folder(path.parent, '--perfetto'), replacing(path) as f:
        mark = b'{"traceEvents": ['
        for event in _events(steps, host_names(run.all(RanksRecord))):
            f.write(mark + json.dumps(event).encode())
            mark = b', '
        f.write(b']}')
    return (
        f'{path}: {plural(max(map(len, steps.values())), "step")} of '
        f'{plural(len(steps), "rank")}; the clocks are '
        f'aligned by the ends of exchanges, with an error of {1e3 * error_s:.2f} ms (95th '
        f'percentile){note}'
    )
