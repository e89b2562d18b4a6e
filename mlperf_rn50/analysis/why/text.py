"""Answers about the time of a run: what limits it, or what changed between two runs. Pure functions of records."""
import math
import statistics
from contextlib import suppress

from mlperf_rn50.analysis.why.answer import Answer
from mlperf_rn50.analysis.why.limit import INPUT, OUTSIDE, Limit, Times, find_limit, times_of
from mlperf_rn50.analysis.why.load import WhyRun, load_run
from mlperf_rn50.errors import UserError
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.text import percent, plural, printable

_ERRORS = 4.0  # standard errors of a change that is more than noise; 3 are frequent with few evaluations
NAMES = {'read': 'input: reading record files', 'decode': 'input: decoding', 'prepare': 'input: preparing in Python',
         'python': 'Python', 'compute': 'forward and backward', 'slow_rank': 'waiting for the slowest rank',
         'exchange': 'exchange', 'update': 'update', 'evaluation': 'evaluation', 'checkpoints': 'checkpoints',
         'rest': 'rest'}
# By verdict and part: what takes the share of the time, and the next thing to try.
_TEXTS = {
    ('input', None): ('waits for input', 'measure the input with mlperf-rn50 bench data'),
    ('input', 'storage'): ('waits for input, mostly for reading record files', 'raise data.read_threads or '
        'data.record_cache_mib, or copy data.dir to a local disk; mlperf-rn50 bench data has cold and warm caches'),
    ('input', 'decoding'): ('waits for input, mostly for decoding', 'raise data.num_threads up to the number of cores '
        'of a rank, or prepare smaller images; mlperf-rn50 bench data --threads measures it'),
    ('input', 'python'): ('waits for input, mostly for preparing it in Python', 'raise data.input_batch_multiplier or '
        'data.prefetch_depth; mlperf-rn50 bench data measures the pipeline'),
    ('python', None): ('is Python: the device waits for the training loop', 'run mlperf-rn50 doctor, which finds ranks '
        'that share cores, and raise run.metrics_period_steps; run.trace shows single steps'),
    ('exchange', 'link'): ('is exchange that the backward pass does not hide', 'set comm.compression to fp16 or raise '
        'train.local_batch_size; mlperf-rn50 bench allreduce measures the link, and mlperf-rn50 doctor checks it'),
    ('exchange', 'latency'): ('is exchange, mostly the latency of its buckets', 'lower comm.num_buckets; mlperf-rn50 '
        'bench allreduce measures the latency'),
    ('slow_rank', None): ('is waiting for the slowest rank', 'run mlperf-rn50 doctor on all hosts, and look for other '
        'programs, throttling and shared cores there'),
    ('computation', None): ('is forward and backward below the measured peak', 'try train.precision, '
        'data.pad_to_4_channels and model.fused_bn_relu with mlperf-rn50 bench train'),
    ('evaluation', None): ('is evaluation', 'raise train.eval_period or train.eval_batch_size, and check data.num_val'),
    ('checkpoints', None): ('is waiting for checkpoints', 'raise checkpoint.period_epochs, checkpoint.period_steps or '
        'checkpoint.period_s, or move run.dir to a faster disk'),
    ('batch', None): ('is update, Python and exchange, which do not grow with the batch', 'raise '
        'train.local_batch_size or use fewer ranks; mlperf-rn50 recipe shows hyper-parameters for other batches')}


def _sentence(times: Times, limit: Limit) -> str:
    peak = '' if times.peak_share is None else f' at {percent(times.peak_share, ".0f")} of the peak'
    shares = {name: percent(s / times.total_s, '.0f') for name, s in times.parts.items()}
    if limit.name == 'healthy':
        largest = max((name for name in times.parts if name != 'compute'), key=lambda name: times.parts[name])
        return (f'Nothing limits this run: {shares["compute"]} of the time is forward and backward{peak}; the largest '
                f'other part, {NAMES[largest]}, takes {shares[largest]}.')
    rank = limit.rank
    where = f', on rank {rank.rank} ({rank.host}, cores {rank.cores or "unknown"})' if rank else ''
    where += f', since epoch {limit.since}' if limit.since is not None else ''
    if limit.name == 'batch' and times.network:
        where = f'; a rank has only {plural(times.network.local_batch_size, "image")} per step'
    return (f'{percent(limit.share, ".0f")} of the time {_TEXTS[limit.name, limit.part][0]}{where}; at most '
            f'{limit.gain:.2f} times as fast without this.')


def explain_time(run: WhyRun) -> Answer:
    """Return what limits a run, the parts of its time, and the next thing to try."""
    times, rows = times_of(run), []
    limit = find_limit(times, run.config.get('train', {}).get('device') == 'cpu')
    record, last, _ = times.intervals[-1]
    for name, s in times.parts.items():
        spread = last.spread_s.get('data' if name in INPUT else 'wait' if name == 'exchange' else name, ())[:2]
        per_step = '-' if name in OUTSIDE else f'{1000 * s / times.num_steps:.2f}'
        rows += [(NAMES[name], percent(s / times.total_s, '.1f'), per_step,
                  *([f'{1000 * x:.2f}' for x in spread] or ['-', '-']))] if s > 1e-6 or spread else []
    facts: list[str | float | None] = [f'critical rank {last.rank} on {last.host}', last.hidden_s and
             f'{1000 * last.hidden_s / last.num_steps:.2f} ms of exchange per step hidden under backward',
             times.bandwidth and f'the rest of the exchange at {times.bandwidth / 1e9:.3g} GB/s',
             record.latency_s and f'latency {1000 * record.latency_s:.3g} ms',
             times.flops_per_s and f'{times.flops_per_s / 1e9:.3g} GFLOP/s per rank',
             times.peak_share and f'{percent(times.peak_share, ".0f")} of the measured peak']
    missing = [] if times.network and last.spread_s else [
        'Not recorded, because an earlier version wrote this run: parts of the input, Python, waiting for the slowest '
        'rank, update, checkpoints, bandwidth, peak.']
    next_step = 'mlperf-rn50 predict shows the time on more nodes' if limit.name == 'healthy' else _TEXTS[
        limit.name, limit.part][1]
    return Answer(
        _sentence(times, limit), ('part', 'share', 'ms per step', 'median', '99th percentile'), tuple(rows),
        f'{next_step}.', (f'Also: {", ".join(str(f) for f in facts if f)}.', *missing),
        {'verdict': limit.name, 'part': limit.part, 'share': limit.share, 'gain': limit.gain,
         'since_epoch': limit.since, 'rank': limit.rank and limit.rank.rank, 'host': limit.rank and limit.rank.host,
         'peak_share': times.peak_share, 'bandwidth_bytes_per_s': times.bandwidth,
         'parts_s': times.parts})


def limit_sentence(folder: RunFolder) -> str:
    """Return what limits a run in one sentence, or '' if it recorded no times of ranks."""
    with suppress(UserError):
        return printable(explain_time(load_run(folder)).sentence)
    return ''


def compare_times(first: Times, second: Times) -> Answer:
    """Return which phase of the second run changed most, and whether by more than the noise between intervals."""
    rows, changes, steps = [], [], first.num_steps / len(first.intervals)
    for name, label in {'step': 'whole step', **NAMES}.items():
        if name == 'rest':
            continue
        is_rare, names = name in OUTSIDE, [n for n in NAMES if n not in OUTSIDE and name in ('step', n)]
        samples = [[1000 * (parts[name] if is_rare else sum(parts[n] for n in names) / rank.num_steps)
                    for _, rank, parts in times.intervals] for times in (first, second)]
        before, now = map(statistics.fmean, samples)
        noise = _ERRORS * math.sqrt(sum(statistics.variance(s) / len(s) for s in samples)) if min(
            map(len, samples)) > 1 else math.inf
        unit = 'per evaluation' if is_rare else 'per step'
        rows += [(f'{label}, ms {unit}', f'{before:.2f}', f'{now:.2f}', f'{now - before:+.2f}',
                  'unknown' if math.isinf(noise) else f'{noise:.2f}')] if before or now else []
        if name == 'step':
            sentence = f'A step takes {now:.3g} instead of {before:.3g} ms ({percent(now / (before or 1) - 1, "+.0f")})'
        elif abs(now - before) > noise:
            changes.append((-abs(now - before) * (1 if is_rare else steps), f'{label} {now - before:+.3g} ms {unit}'))
    texts = ', '.join(text for _, text in sorted(changes)[:3]) or 'no phase changed by more than its noise'
    return Answer(f'{sentence}; {texts}.', ('phase', 'first', 'second', 'change', 'noise'), tuple(rows))
