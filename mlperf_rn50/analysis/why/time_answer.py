"""Answers about the time of a run: what limits it, or what changed between two runs."""

import math
import statistics
from contextlib import suppress

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why.answer import Answer
from mlperf_rn50.analysis.why.bottleneck import (
    OUTSIDE,
    Bottleneck,
    Times,
    find_bottleneck,
    times_of,
)
from mlperf_rn50.errors import UserError
from mlperf_rn50.text import percent, plural, printable

_NO_CORES = (
    'Not recorded by the version that trained: whether other programs used the cores of the ranks.'
)
_LEAST_CHANGE = 0.01  # of the time of a part; smaller changes are not named, however certain
NAMES = {
    'read': 'input: reading record files',
    'decode': 'input: decoding',
    'prepare': 'input: preparing in Python',
    'python': 'Python',
    'compute': 'forward and backward',
    'exchange': 'exchange',
    'update': 'update',
    'evaluation': 'evaluation',
    'checkpoints': 'checkpoints',
    'rest': 'rest',
}
_TEXTS = {  # by verdict and part: what takes the share of the time, and the next thing to try
    'input': ('waits for input', 'run mlperf-rn50 bench data'),
    'input storage': (
        'waits for input, mostly for reading record files',
        'raise data.record_cache_mib',
    ),
    'input decoding': ('waits for input, mostly for decoding', 'raise data.num_threads'),
    'input python': (
        'waits for input, mostly for preparing it in Python',
        'raise data.prefetch_depth',
    ),
    'python': ('waits for Python, the training loop', 'raise run.metrics_period_steps'),
    'exchange link': (
        'is exchange that the backward pass does not hide',
        'set comm.compression to fp16',
    ),
    'exchange latency': ('is latency of the exchange', 'lower comm.num_buckets'),
    'slow_rank': ('is due to the slowest rank', 'run mlperf-rn50 doctor'),
    'computation': (
        'is forward and backward below the measured peak',
        'run mlperf-rn50 bench train',
    ),
    'evaluation': ('is evaluation', 'raise train.eval_period or train.eval_batch_size'),
    'checkpoints': (
        'waits for checkpoints',
        'raise checkpoint.period_epochs or checkpoint.period_steps',
    ),
    'batch': (
        'is update, Python and exchange, which do not grow with the batch',
        'raise train.local_batch_size',
    ),
    'exchange host': (
        'is exchange between ranks of one host, which the backward pass does not hide',
        'start fewer ranks, with more cores each',
    ),
    'stopped': (
        'is due to a rank that was stopped (SIGSTOP)',
        'look for the program that stops it, such as cpulimit',
    ),
    'busy': (
        'Busy machine: {place} got {own} of its cores, and other programs {others}',
        'stop the other programs of this host, which top lists',
    ),
    'stolen': (
        'Busy machine: {place} got {own} of its cores, and the host of the virtual machine took '
        '{stolen}',
        'use a virtual machine with cores of its own',
    ),
    'crowded': (
        'Crowded cores: {ranks} with {threads} per rank compute on the cores of {place}',
        'start fewer ranks per host, or lower OMP_NUM_THREADS',
    ),
    'quota': (
        'CPU quota: it stops {place}, which got {own} of its cores',
        'raise the quota of its control group',
    ),
    'uneven': (
        'is forward and backward above that of the fastest tenth of the steps',
        'look at the cores of the ranks with top',
    ),
    'healthy': ('', 'run mlperf-rn50 predict for the time on more nodes'),
}


def _text(limit: Bottleneck) -> tuple[str, str]:
    return _TEXTS[f'{limit.name} {limit.part or ""}'.strip()]


def _cause(times: Times, limit: Bottleneck) -> str:
    """Return what limits a run, as the start of a sentence."""
    (text, _), lack = _text(limit), limit.shortage
    place = (
        f'rank {limit.rank.rank} ({limit.rank.host}, cores {limit.rank.cores})'
        if limit.rank
        else ''
    )
    if lack:
        values = {name: percent(getattr(lack, name), '.0f') for name in ('own', 'others', 'stolen')}
        return text.format(
            place=place,
            ranks=plural(lack.rank.num_sharing, 'rank'),
            threads=plural(lack.rank.num_threads or 1, 'thread'),
            **values,
        )
    where = f', {place}' if place else ''
    where += f', since epoch {limit.since}' if limit.since is not None else ''
    if limit.name == 'batch':
        where = f'; a rank has only {plural(times.network.local_batch_size, "image")} per step'
    return f'{percent(limit.share, ".0f")} of the time {text}{where}'


def _sentence(times: Times, limit: Bottleneck) -> str:
    if limit.name == 'healthy':
        shares = {name: percent(s / times.total_s, '.0f') for name, s in times.parts.items()}
        largest = max(
            (name for name in times.parts if name != 'compute'), key=lambda name: times.parts[name]
        )
        peak = f' at {percent(times.peak_share, ".0f")} of the peak' if times.peak_share else ''
        return (
            f'Healthy: {shares["compute"]} of the time is forward and backward{peak}; the largest '
            f'other part, {NAMES[largest]}, takes {shares[largest]}.'
        )
    also = f' Besides, {_cause(times, limit.also).rpartition(": ")[2]}.' if limit.also else ''
    return f'{_cause(times, limit)}; at most {limit.gain:.2f} times as fast without this.{also}'


def explain_time(run: RunData) -> Answer:
    """Return what limits a run, the parts of its time, and the next thing to try."""
    times, rows = times_of(run), []
    limit = find_bottleneck(times)
    record, last, _ = times.intervals[-1]
    for name, s in times.parts.items():
        spread = last.spread_s.get('wait' if name == 'exchange' else name, ())[:2]
        columns = [s / times.num_steps, *spread] if name not in OUTSIDE else []
        cells = [f'{1000 * x:.2f}' for x in columns]
        rows += [
            (NAMES[name], percent(s / times.total_s, '.1f'), *cells, *['-'] * (3 - len(cells)))
        ]
    facts = [
        f'rank that waits least {last.rank} on {last.host}',
        *(
            f'{text} {value:.3g} {unit}'
            for text, value, unit in (
                ('exchange under backward', 1000 * last.hidden_s / last.num_steps, 'ms per step'),
                ('rest of the exchange', times.bandwidth / 1e9, 'GB/s'),
                ('latency', 1000 * (record.latency_s or 0), 'ms'),
                ('each rank', times.flops_per_s / 1e9, 'GFLOP/s'),
                ('share of the measured peak', 100 * times.peak_share, '%'),
            )
            if value
        ),
    ]
    return Answer(
        _sentence(times, limit),
        ('part', 'share', 'ms per step', 'median', '99th percentile'),
        tuple(rows),
        _text(limit)[1],
        (f'Also: {", ".join(facts)}.', *[_NO_CORES] * (times.is_cpu and not last.wall_s)),
        {
            'verdict': limit.name,
            'part': limit.part,
            'share': limit.share,
            'gain': limit.gain,
            'also': limit.also and limit.also.name,
            'since_epoch': limit.since,
            'rank': limit.rank and limit.rank.rank,
            'host': limit.rank and limit.rank.host,
            'bandwidth_bytes_per_s': times.bandwidth,
            'peak_share': times.peak_share,
            'parts_s': times.parts,
        },
    )


def bottleneck_sentence(run: RunData) -> str:
    """Return what limits a run in one sentence, or '' if it recorded no times of ranks."""
    with suppress(UserError):
        return printable(explain_time(run).sentence)
    return ''


def compare_times(first: Times, second: Times) -> Answer:
    """Return which phase of the second run changed most, and whether by more than the noise between
    intervals."""
    rows, changes, totals = [], [], []
    for name in NAMES:
        samples = [
            [1000 * parts.get(name, 0.0) / rank.num_steps for _, rank, parts in times.intervals]
            for times in (first, second)
        ]
        before, now = map(statistics.fmean, samples)
        if name not in OUTSIDE:
            totals.append((before, now))
        # Student's t at 1 % is about 3 * (1 + 9 / freedom ** 2)
        freedom = sum(map(len, samples)) - 2
        noise = (
            math.inf
            if min(map(len, samples)) < 2
            else 3
            * (1 + 9 / freedom**2)
            * math.sqrt(sum(statistics.variance(s) / len(s) for s in samples))
        )
        if before or now:
            rows.append(
                (
                    NAMES[name],
                    *(f'{ms:.2f}' for ms in (before, now)),
                    f'{now - before:+.2f}',
                    f'{noise:.2f}'.replace('inf', 'unknown'),
                )
            )
            changes.append((abs(now - before), noise, f'{NAMES[name]} {now - before:+.3g} ms'))
    before, now = (sum(column) for column in zip(*totals))
    found = [
        text
        for ms, noise, text in sorted(changes, reverse=True)
        if ms > max(noise, _LEAST_CHANGE * before)
    ]
    return Answer(
        f'A step takes {now:.3g} instead of {before:.3g} ms '
        f'({percent(now / (before or 1) - 1, "+.0f")}); '
        f'{", ".join(found[:3]) or "no phase changed by more than its noise"}.',
        ('ms per step', 'first', 'second', 'change', 'noise'),
        tuple(rows),
    )
