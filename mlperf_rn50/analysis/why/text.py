"""Answers about the time of a run: what limits it, or what changed between two runs."""
import math
import statistics
from contextlib import suppress

from mlperf_rn50.analysis.why.answer import Answer
from mlperf_rn50.analysis.why.limit import OUTSIDE, Limit, Times, find_limit, times_of
from mlperf_rn50.analysis.why.load import WhyRun, load_run
from mlperf_rn50.errors import UserError
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.text import percent, plural, printable

_LEAST_CHANGE = 0.01  # of a step; smaller ones are not named, however certain
NAMES = {'read': 'input: reading record files', 'decode': 'input: decoding', 'prepare': 'input: preparing in Python',
         'python': 'Python', 'compute': 'forward and backward', 'slow_rank': 'waiting for the slowest rank',
         'exchange': 'exchange', 'update': 'update', 'evaluation': 'evaluation', 'checkpoints': 'checkpoints',
         'rest': 'rest'}
_TEXTS = {  # by verdict and part: what takes the share of the time, and the next thing to try
    'input': ('waits for input', 'run mlperf-rn50 bench data'),
    'input storage': ('waits for input, mostly for reading record files', 'raise data.read_threads or '
                      'data.record_cache_mib, or use a local disk; run mlperf-rn50 bench data'),
    'input decoding': ('waits for input, mostly for decoding', 'raise data.num_threads; run mlperf-rn50 bench data'),
    'input python': ('waits for input, mostly for preparing it in Python', 'raise data.prefetch_depth or '
                     'data.input_batch_multiplier; run mlperf-rn50 bench data'),
    'python': ('waits for Python, the training loop', 'raise run.metrics_period_steps; run mlperf-rn50 doctor'),
    'exchange link': ('is exchange that the backward pass does not hide', 'set comm.compression to fp16, or raise '
                      'train.local_batch_size; run mlperf-rn50 bench allreduce'),
    'exchange latency': ('is latency of the exchange', 'lower comm.num_buckets; run mlperf-rn50 bench allreduce'),
    'slow_rank': ('is due to the slowest rank', 'run mlperf-rn50 doctor; look for other programs and throttling there'),
    'computation': ('is forward and backward below the measured peak', 'try train.precision with '
                    'mlperf-rn50 bench train'),
    'evaluation': ('is evaluation', 'raise train.eval_period or train.eval_batch_size, or check data.num_val'),
    'checkpoints': ('waits for checkpoints', 'raise checkpoint.period_epochs, checkpoint.period_steps or '
                    'checkpoint.period_s, or use a faster disk for run.dir'),
    'batch': ('is update, Python and exchange, which do not grow with the batch', 'raise train.local_batch_size, or '
              'use fewer ranks; mlperf-rn50 recipe shows hyper-parameters'),
    'healthy': ('', 'mlperf-rn50 predict shows the time on more nodes')}


def _sentence(times: Times, limit: Limit, text: str) -> str:
    shares = {name: percent(s / times.total_s, '.0f') for name, s in times.parts.items()}
    if limit.name == 'healthy':
        largest = max((name for name in times.parts if name != 'compute'), key=lambda name: times.parts[name])
        peak = f' at {percent(times.peak_share, ".0f")} of the peak' if times.peak_share else ''
        return (f'Healthy: {shares["compute"]} of the time is forward and backward{peak}; the largest '
                f'other part, {NAMES[largest]}, takes {shares[largest]}.')
    where = f', on rank {limit.rank.rank} ({limit.rank.host}, cores {limit.rank.cores})' if limit.rank else ''
    where += f', since epoch {limit.since}' if limit.since is not None else ''
    if limit.name == 'batch' and times.network:
        where = f'; a rank has only {plural(times.network.local_batch_size, "image")} per step'
    return (f'{percent(limit.share, ".0f")} of the time {text}{where}; at most {limit.gain:.2f} times as fast without '
            'this.')


def explain_time(run: WhyRun) -> Answer:
    """Return what limits a run, the parts of its time, and the next thing to try."""
    times, rows = times_of(run), []
    limit, (record, last, _) = find_limit(times), times.intervals[-1]
    text, next_step = _TEXTS[f'{limit.name} {limit.part or ""}'.strip()]
    for name, s in times.parts.items():
        spread = last.spread_s.get('wait' if name == 'exchange' else name, ())[:2]
        columns = [s / times.num_steps, *spread] if name not in OUTSIDE else []
        cells = [f'{1000 * x:.2f}' for x in columns]
        rows += [(NAMES[name], percent(s / times.total_s, '.1f'), *cells, *['-'] * (3 - len(cells)))]
    facts = [f'critical rank {last.rank} on {last.host}', *(f'{text} {value:.3g} {unit}' for text, value, unit in (
        ('exchange under backward', 1000 * last.hidden_s / last.num_steps, 'ms per step'),
        ('rest of the exchange', times.bandwidth / 1e9, 'GB/s'), ('latency', 1000 * (record.latency_s or 0), 'ms'),
        ('each rank', times.flops_per_s / 1e9, 'GFLOP/s'), ('share of the measured peak', 100 * times.peak_share, '%')
        ) if value)]
    missing = () if times.network and last.spread_s else (
        'Not recorded by the earlier version that wrote this run: parts of the input, Python, waiting for the slowest '
        'rank, update, checkpoints, bandwidth, peak.',)
    return Answer(
        _sentence(times, limit, text), ('part', 'share', 'ms per step', 'median', '99th percentile'), tuple(rows),
        f'{next_step}.', (f'Also: {", ".join(facts)}.', *missing),
        {'verdict': limit.name, 'part': limit.part, 'share': limit.share, 'gain': limit.gain,
         'since_epoch': limit.since, 'rank': limit.rank and limit.rank.rank, 'host': limit.rank and limit.rank.host,
         'bandwidth_bytes_per_s': times.bandwidth, 'peak_share': times.peak_share, 'parts_s': times.parts})


def limit_sentence(folder: RunFolder) -> str:
    """Return what limits a run in one sentence, or '' if it recorded no times of ranks."""
    with suppress(UserError):
        return printable(explain_time(load_run(folder)).sentence)
    return ''


def compare_times(first: Times, second: Times) -> Answer:
    """Return which phase of the second run changed most, and whether by more than the noise between intervals."""
    rows, changes, steps = [], [], first.num_steps / len(first.intervals)
    for name in ('step', *NAMES):
        is_rare, names = name in OUTSIDE, [n for n in first.parts if n not in OUTSIDE] if name == 'step' else [name]
        samples = [[1000 * sum(parts.get(n, 0.0) for n in names) / (1 if is_rare else rank.num_steps)
                    for _, rank, parts in times.intervals] for times in (first, second)]
        (before, now), unit = map(statistics.fmean, samples), 'per evaluation' if is_rare else 'per step'
        freedom = sum(map(len, samples)) - 2  # Student's t at 1 % is about 3 * (1 + 9 / freedom ** 2)
        noise = math.inf if min(map(len, samples)) < 2 else 3 * (1 + 9 / freedom ** 2) * math.sqrt(
            sum(statistics.variance(s) / len(s) for s in samples))
        if name == 'step':
            least = _LEAST_CHANGE * before
            sentence = f'A step takes {now:.3g} instead of {before:.3g} ms ({percent(now / (before or 1) - 1, "+.0f")})'
        elif abs(now - before) > max(noise, least * (scale := steps if is_rare else 1)):
            changes.append((-abs(now - before) / scale, f'{NAMES[name]} {now - before:+.3g} ms {unit}'))
        rows += [(f'{NAMES.get(name, "whole step")}, ms {unit}', f'{before:.2f}', f'{now:.2f}',
                  f'{now - before:+.2f}', f'{noise:.2f}'.replace('inf', 'unknown'))] if before or now else []
    texts = ', '.join(text for _, text in sorted(changes)[:3]) or 'no phase changed by more than its noise'
    return Answer(f'{sentence}; {texts}.', ('phase', 'first', 'second', 'change', 'noise'), tuple(rows))
