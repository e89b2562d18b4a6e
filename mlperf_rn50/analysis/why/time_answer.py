"""Answers about the time of a run: what limits it, or what changed between two runs."""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why.bottleneck import (
    OUTSIDE,
    Bottleneck,
    Times,
    find_bottleneck,
    times_of,
)
from mlperf_rn50.answer import Answer, Cell, Table, columns
from mlperf_rn50.config import Config
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import load_ini
from mlperf_rn50.mllog.goodput import goodput_of, last_seen_s, render_goodput
from mlperf_rn50.runfolder.records import PartRecord
from mlperf_rn50.text import percent, plural, printable, significant

_NO_CORES = (
    'Not recorded by the version that trained: whether other programs used the cores of the ranks.'
)
# values of a run whose times are not known, and of a comparison
UNKNOWN = dict.fromkeys(
    columns(
        'sentence | next_step | notes | evidence | verdict | part | share | gain | also | '
        'since_epoch | rank | host | bandwidth_bytes_per_s | peak_share | parts_s'
    )
) | render_goodput(None)
_LEAST_CHANGE = 0.01  # of the time of a part; smaller changes are not named, however certain
_VERDICTS = load_ini(Path(__file__).with_name('verdicts.ini'))
_NAMES = _VERDICTS['names of parts']


def make_explanation(
    sentence: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    next_step: str = '',
    notes: Sequence[str] = (),
    **values: object,
) -> Answer:
    """Return an answer with its evidence as a table; values: further keys of its data."""
    below = [*([f'Next: {next_step}'] if next_step else []), *notes]
    return Answer(
        sentences=[sentence],
        tables=[Table('', head, [list(map(Cell, row)) for row in rows])],
        parts=[Answer(notes=[note]) for note in below],  # with an empty line between them
        data={
            **values,
            'sentence': sentence,
            'next_step': next_step,
            'notes': list(notes),
            'evidence': [dict(zip(head, row)) for row in rows],
        },
    )


def _text(found: Bottleneck, key: str) -> str:
    return _VERDICTS[f'{found.name} {found.part or ""}'.strip()][key]


def _next_step(run: RunData, times: Times, found: Bottleneck) -> str:
    config = run.config or Config()
    # changes that were made already
    is_small = config.train.precision == 'float16' or config.comm.compression == 'fp16'
    made = {'link': is_small, 'latency': 1 in (config.comm.num_buckets, times.network.num_buckets)}
    key = 'next otherwise' if found.name == 'exchange' and made.get(found.part or '') else 'next'
    fewer = 'use fewer nodes, or ' if times.num_hosts > 1 else ''
    return _text(found, key).format(batch=config.batch_key, fewer=fewer)


def _share(value: float) -> str:
    return percent(value, '.0f')


def _cause(times: Times, found: Bottleneck) -> str:
    """Return what limits a run, as the start of a sentence."""
    text = _text(found, 'cause')
    rank, lack = found.rank, found.shortage
    place = f'rank {rank.rank} ({rank.host}, cores {rank.cores})' if rank else ''
    if lack:
        return text.format(
            place=place,
            ranks=plural(lack.rank.num_sharing, 'rank'),
            threads=plural(lack.rank.num_threads or 1, 'thread'),
            own=_share(lack.own),
            others=_share(lack.others),
            stolen=_share(lack.stolen),
        )
    where = f', {place}' if place else ''
    if found.since is not None:
        where += f', since epoch {found.since}'
    if found.name == 'batch':
        where = f'; a rank has only {plural(times.network.local_batch_size, "image")} per step'
    return f'{_share(found.share)} of the time {text}{where}'


def _sentence(times: Times, found: Bottleneck) -> str:
    if found.name == 'healthy':
        parts = {name: s for name, s in times.parts.items() if name != 'compute'}
        largest = max(parts, key=parts.__getitem__)
        text = _text(found, 'cause').format(
            compute=_share(times.parts['compute'] / times.total_s),
            peak=f' at {_share(times.peak_share)} of the peak' if times.peak_share else '',
            largest=_NAMES[largest],
            share=_share(parts[largest] / times.total_s),
        )
        return f'{text}.'
    also = f' Besides, {_cause(times, found.also).rpartition(": ")[2]}.' if found.also else ''
    return f'{_cause(times, found)}; at most {found.gain:.2f} times as fast without this.{also}'


def explain_time(run: RunData) -> Answer:
    """Return what limits a run, the parts of its time, and the next thing to try."""
    times = times_of(run)
    found = find_bottleneck(times)
    record, last, *_ = times.intervals[-1]
    rows = []
    for name, s in times.parts.items():
        cells = ['-'] * 3
        if name not in OUTSIDE:
            spread = last.spread_s.get('wait' if name == 'exchange' else name, ())[:2]
            known = [f'{1000 * x:.2f}' for x in (s / times.num_steps, *spread)]
            cells[: len(known)] = known
        rows.append((_NAMES[name], percent(s / times.total_s, '.1f'), *cells))
    facts = [
        f'{text} {significant(value)} {unit}'
        for text, value, unit in (
            ('exchange under backward', 1000 * last.hidden_s / last.num_steps, 'ms per step'),
            ('exchange at', times.bandwidth / 1e9, 'GB/s'),
            ('latency', 1000 * (record.latency_s or 0), 'ms'),
            ('each rank', times.flops_per_s / 1e9, 'GFLOP/s'),
            ('share of the measured peak', 100 * times.peak_share, '%'),
        )
        if value
    ]
    goodput = None
    if run.log:
        goodput = goodput_of(run.log, run.all(PartRecord), last_seen_s(run.records))
    also = ', '.join([f'rank that waits least {last.rank} on {last.host}', *facts])
    return make_explanation(
        _sentence(times, found),
        columns('part | share | ms per step | median | 99th percentile'),
        rows,
        next_step=_next_step(run, times, found),
        notes=[
            f'Also: {also}.',
            *([f'Goodput: {goodput.text}.'] if goodput else []),
            *([_NO_CORES] if times.is_cpu and not last.wall_s else []),
        ],
        verdict=found.name,
        part=found.part,
        share=found.share,
        gain=found.gain,
        also=found.also and found.also.name,
        since_epoch=found.since,
        rank=found.rank and found.rank.rank,
        host=found.rank and found.rank.host,
        bandwidth_bytes_per_s=times.bandwidth,
        peak_share=times.peak_share,
        parts_s=times.parts,
        **render_goodput(goodput),
    )


def bottleneck_sentence(run: RunData) -> str:
    """Return what limits a run in one sentence, or '' if it recorded no times of ranks."""
    with suppress(UserError):
        times = times_of(run)
        return printable(_sentence(times, find_bottleneck(times)))
    return ''


def _noise(*samples: Sequence[float]) -> float:
    """Return the difference of the means of two samples that chance explains."""
    if min(map(len, samples)) < 2:
        return math.inf
    freedom = sum(map(len, samples)) - 2
    # Student's t at 1 % is about 3 * (1 + 9 / freedom ** 2)
    t = 3 * (1 + 9 / freedom**2)
    return t * math.sqrt(sum(statistics.variance(s) / len(s) for s in samples))


def compare_times(first: Times, second: Times) -> Answer:
    """Return which phase of the second run changed most, and whether by more than the noise between
    intervals."""
    rows, changes = [], []
    step_before = step_now = 0.0
    for name, text in _NAMES.items():
        samples = [
            [1000 * i.parts.get(name, 0.0) / i.rank.num_steps for i in times.intervals]
            for times in (first, second)
        ]
        before, now = map(statistics.fmean, samples)
        change, noise = now - before, _noise(*samples)
        if name not in OUTSIDE:
            step_before += before
            step_now += now
        if before or now:
            known = f'{noise:.2f}' if noise < math.inf else 'unknown'
            rows.append((text, f'{before:.2f}', f'{now:.2f}', f'{change:+.2f}', known))
            changes.append((abs(change), noise, f'{text} {significant(change, "+")} ms'))
    found = [
        text
        for ms, noise, text in sorted(changes, reverse=True)
        if ms > max(noise, _LEAST_CHANGE * step_before)
    ]
    none = 'no phase changed by more than its noise'
    if min(len(times.intervals) for times in (first, second)) < 2:
        none = 'no phase can be named, because a run has a single evaluation and thus no noise'
    return make_explanation(
        f'A step takes {significant(step_now)} instead of {significant(step_before)} ms '
        f'({percent(step_now / (step_before or 1) - 1, "+.0f")}); '
        f'{", ".join(found[:3]) or none}.',
        columns('ms per step | first | second | change | noise'),
        rows,
    )
