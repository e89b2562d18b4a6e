"""Where the time of a run goes along its critical path, and what limits the run. Pure functions of
records.

The critical path follows, in each step, the rank for which the others wait. So each of its phases
can be gained.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why.cores import Shortage, find_shortage
from mlperf_rn50.errors import UserError
from mlperf_rn50.runfolder.records import (
    EndRecord,
    NetworkRecord,
    RanksRecord,
    RankSteps,
    ResumedRecord,
)
from mlperf_rn50.text import grouped

# parts of waiting for images
INPUT = {'read': 'storage', 'decode': 'decoding', 'prepare': 'python'}
# parts outside the steps; rest: of the time on the clock
OUTSIDE = ('evaluation', 'checkpoints', 'rest')
# phases in which a rank does not depend on the others
_OWN = ('data', 'python', 'compute', 'update')
# of the time; without a smaller part, a run is less than 1.1 times as fast
_LEAST_SHARE = 1 - 1 / 1.1
# 6 to 21 % were measured on digits, where validation has a fourth of the training images
_LEAST_EVALUATION = 0.3
# On CPUs, the cores that compute also move the gradients, so much exchange is normal. A link below
# 1 Gbit/s is not.
_LEAST_CPU_EXCHANGE, _SLOW_LINK = 0.3, 1.25e8
_FEW_IMAGES = 15  # per rank; the fewest per accelerator in a published run that converged
# of a step that does not depend on the batch; twice the batch is then at least a tenth faster
_LEAST_FIXED = 0.2
# of the peak, of which ResNet-50 reached 63 % on digits and a CPU; not measured on GPUs
_LOW_PEAK = 0.06
# instead, if ranks lacked many cores, which makes times uneven
_LEAST_SHORT, _LEAST_SHORT_FIXED = 0.25, 0.5
_FAR = 1 / 3  # of the computation of a rank, by which it exceeds that of the others
# ratio of the median and the fastest tenth of so many steps
_LEAST_UNEVENNESS, _LEAST_STEPS = 1.9, 50
# ratio of mean and median of a step in an interval that was slow only at its start
_SLOW_START = 1.5


@dataclass(frozen=True)
class Times:
    """Seconds of a run by part along its critical path. The parts add up to the clock."""

    parts: dict[str, float]
    # with the rank that waits least, and parts
    intervals: Sequence[tuple[RanksRecord, RankSteps, dict[str, float]]]
    network: NetworkRecord | None
    is_cpu: bool
    num_steps: int
    has_sizes: bool  # whether images of several sizes are planned
    # bytes/s in a ring all-reduce, while the backward pass does not hide it; 0 if unknown
    bandwidth: float
    # of a rank in forward and backward, which has twice the operations of forward; 0 if unknown
    flops_per_s: float

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def num_hosts(self) -> int:
        return len({r.host for r in self.intervals[-1][0].ranks})

    @property
    def is_latency(self) -> bool:
        """Whether latency explains half of the exchange."""
        latency_s = sum(
            (record.latency_s or 0.0) * rank.num_steps for record, rank, _ in self.intervals
        )
        return (
            self.network is not None
            and 2 * self.network.num_buckets * latency_s > self.parts['exchange']
        )

    @property
    def peak_share(self) -> float:
        peak = self.network and self.network.peak_flops_per_s
        return self.flops_per_s / peak if peak else 0.0


@dataclass(frozen=True)
class Limit:
    """What limits a run, and its share of the time."""

    # stopped, those of a Shortage, input, python, exchange, slow_rank, computation, evaluation,
    # checkpoints, batch, uneven or healthy
    name: str
    share: float
    # storage, decoding or python of input; host, link or latency of exchange
    part: str | None = None
    rank: RankSteps | None = None  # the rank concerned, from epoch `since` on
    since: int | None = None
    shortage: Shortage | None = None
    also: 'Limit | None' = None  # the next one of a run that lacked cores or was stopped

    @property
    def gain(self) -> float:
        return 1 / max(1 - self.share, 1e-3)


def _own_s(rank: RankSteps, *names: str) -> float:
    return sum(getattr(rank, f'{name}_s') for name in names)


def _parts_of(record: RanksRecord, rank: RankSteps) -> dict[str, float]:
    """Return the parts of an interval along its critical path; rank: the one that waits least."""
    names = (*_OWN, 'wait', 'read', 'decode')
    # Version 0.5.0 did not record the critical path.
    paths = [r.critical_s for r in record.ranks if r.critical_s] or [
        {name: _own_s(rank, name) for name in names}
    ]
    s = {name: sum(path.get(name, 0.0) for path in paths) for name in names}
    return {
        'read': s['read'],
        'decode': s['decode'],
        'prepare': max(0.0, s['data'] - s['read'] - s['decode']),
        'python': s['python'],
        'compute': s['compute'],
        'exchange': s['wait'],
        'update': s['update'],
        'evaluation': record.eval_s,
        'checkpoints': record.checkpoint_s,
    }


def times_of(run: RunData) -> Times:
    """Return the times of a run, without a first interval that was slow only at its start."""
    # a resume repeats epochs
    records = [r for r in {r.epoch: r for r in run.all(RanksRecord)}.values() if r.ranks]
    if not records:
        action = (
            'wait for the first one'
            if run.log and run.log.status == 'running'
            else 'train with this version'
        )
        raise UserError(
            f'{run.folder.metrics}: got no times of ranks, expected those of an evaluation; '
            f'{action}'
        )
    critical, start_s = [min(r.ranks, key=lambda rank: rank.wait_s) for r in records], 0.0
    means = [_own_s(rank, *_OWN, 'wait') / rank.num_steps for rank in critical]
    usual_s = sum(critical[0].spread_s.get(name, (0.0,))[0] for name in (*_OWN, 'wait'))
    if (
        len(means) > 2
        and 0 < _SLOW_START * usual_s < means[0]
        and usual_s < _SLOW_START * max(means[1:])
    ):
        start_s, records, critical = records[0].time_s, records[1:], critical[1:]
    intervals = [(record, rank, _parts_of(record, rank)) for record, rank in zip(records, critical)]
    parts = {name: sum(p[name] for *_, p in intervals) for name in intervals[0][2]}
    end = run.last(EndRecord) or EndRecord('')
    parts['checkpoints'] += end.checkpoint_s  # after the last evaluation
    # Training that was lost and times without training, which the record of the last resume states,
    # are no part.
    resumed = run.last(ResumedRecord) or ResumedRecord(0)
    gaps_s = sum(resumed.elapsed_parts.values()) - resumed.elapsed_parts.get(
        'training_preserved_s', 0.0
    )
    end_s = max(records[-1].time_s, end.time_to_train_s or 0.0) - gaps_s
    parts['rest'] = max(end_s - start_s - sum(parts.values()), 1e-9)
    num_steps, num_ranks = sum(rank.num_steps for rank in critical), len(records[-1].ranks)
    net = run.last(NetworkRecord)
    num_bytes, flops = (
        (net.gradient_bytes, net.flops_per_image * net.local_batch_size) if net else (0, 0.0)
    )
    rates = [
        amount * num_steps / parts[part] if parts[part] > 1e-9 else 0.0
        for part, amount in (
            ('exchange', num_bytes * 2 * (num_ranks - 1) / num_ranks),
            ('compute', 3 * flops),
        )
    ]
    return Times(
        parts,
        intervals,
        net,
        run.config is None or run.config.train.device == 'cpu',
        num_steps,
        bool(run.config and run.config.data.sizes),
        *rates,
    )


def _excess_s(times: Times, rank: int, names: Sequence[str], is_short: bool) -> list[float]:
    """Return, by interval, by how much a rank exceeds the median of the other ranks in some phases.

    is_short: whether ranks lacked cores; their waits for cores then do not count.
    """
    by_rank = [
        {
            r.rank: _own_s(r, *names) - is_short * r.ready_s.get('compute', (0.0, 0.0))[1]
            for r in record.ranks
        }
        for record, *_ in times.intervals
    ]
    return [
        own.pop(rank) - statistics.median(own.values()) if rank in own and len(own) > 1 else 0.0
        for own in by_rank
    ]


def _stopped(times: Times) -> Limit | None:
    """Return the rank that was stopped for the largest part of the time."""
    by_rank = grouped((r for record, *_ in times.intervals for r in record.ranks), lambda r: r.rank)
    stopped_s, number = max(
        (sum(r.stopped_s for r in ranks), number) for number, ranks in by_rank.items()
    )
    share = min(stopped_s / times.total_s, 1.0)
    return Limit('stopped', share, rank=by_rank[number][-1]) if share > _LEAST_SHARE else None


def _unevenness(times: Times) -> float:
    """Return the ratio of a usual and a fast computation of a step; 1 if they are not known or
    differ by plan."""
    counts = times.intervals[-1][0].histograms.get('compute', [])
    ends = list(accumulate(counts))
    if not counts or ends[-1] < _LEAST_STEPS or times.has_sizes:
        return 1.0
    fast, usual = (bisect_left(ends, part * ends[-1]) for part in (0.1, 0.5))
    return 2.0 ** min((usual - fast) / 4, 100)


def find_limit(times: Times) -> Limit:
    """Return what limits a run: a stopped rank, a lack of cores, or the largest part above its
    threshold."""
    if stopped := _stopped(times):
        return stopped
    shortage = find_shortage([record for record, *_ in times.intervals]) if times.is_cpu else None
    # cores also move gradients
    slow_link = _SLOW_LINK * (1 - shortage.waited) if shortage else _SLOW_LINK
    is_thin = 0 < times.bandwidth < slow_link and times.num_hosts > 1 and not times.is_latency
    needed_s = sum(
        times.parts[name]
        for name in ('compute', 'update', 'evaluation', *['exchange'] * (not is_thin))
    )
    lacking = shortage.waited * needed_s / times.total_s if shortage else 0.0
    if lacking < _LEAST_SHARE:
        lacking = 0.0
    large = next(iter(_large_parts(times, is_thin, lacking)), None)
    if shortage and lacking:
        lack = Limit(shortage.name, lacking, rank=shortage.rank, shortage=shortage)
        first, second = (large, lack) if large and large.share > 2 * lack.share else (lack, large)
        return replace(first, also=second)
    if large:
        return large
    if 0 < times.peak_share < _LOW_PEAK and 2 * times.parts['compute'] > times.total_s:
        return Limit('computation', times.parts['compute'] / times.total_s * (1 - times.peak_share))
    if (ratio := _unevenness(times)) > _LEAST_UNEVENNESS:
        return Limit('uneven', times.parts['compute'] / times.total_s * (1 - 1 / ratio))
    return Limit(
        'healthy', max(s for name, s in times.parts.items() if name != 'compute') / times.total_s
    )


def _large_parts(times: Times, is_thin: bool, lacking: float) -> list[Limit]:
    """Return the parts of the time above their thresholds, the largest first.

    lacking: share of the time that is due to a lack of cores, which makes all parts uneven, and
    exchanges slow.
    """
    parts, total_s, net = times.parts, times.total_s, times.network
    slow = max(
        (r for *_, r, _ in times.intervals),
        key=lambda r: sum(_excess_s(times, r.rank, _OWN, lacking > 0)),
    )
    excess_s, since = _excess_s(times, slow.rank, ('compute', 'update'), lacking > 0), None
    for (record, rank, _), s in zip(times.intervals, excess_s):
        since = (
            (record.epoch if since is None else since)
            if s > _LEAST_SHARE * _own_s(rank, *_OWN, 'wait')
            else None
        )
    step_s = sum(s for name, s in parts.items() if name not in OUTSIDE)
    fixed_s = parts['update'] + parts['python'] + parts['exchange']
    is_slowed = lacking > 0 and parts['exchange'] > parts['update']
    has_few = (
        net is not None
        and net.local_batch_size < _FEW_IMAGES
        and not is_thin
        and 2 * parts['python'] < fixed_s
    )
    has_few &= fixed_s > (_LEAST_SHORT_FIXED if is_slowed else _LEAST_FIXED) * step_s
    seconds = {
        'input': sum(parts[name] for name in INPUT),
        'python': parts['python'],
        'slow_rank': sum(excess_s),
        'checkpoints': parts['checkpoints'],
        'evaluation': parts['evaluation'],
        'batch': fixed_s * has_few,
        'exchange': parts['exchange'],
    }
    least = min(max(lacking / 2, _LEAST_SHARE), _LEAST_SHORT)
    exceptions = {'evaluation': _LEAST_EVALUATION + least - _LEAST_SHARE}
    if times.is_cpu and not is_thin:
        exceptions['exchange'] = _LEAST_CPU_EXCHANGE + 2 * lacking
    shares = {
        name: s / total_s
        for name, s in seconds.items()
        if s > exceptions.get(name, least) * total_s
    }
    is_host = times.is_cpu and times.num_hosts == 1
    part = {
        'input': INPUT[max(INPUT, key=lambda key: parts[key])] if net else None,
        'exchange': 'host' if is_host else 'latency' if times.is_latency else 'link',
    }
    # A rank whose cores are slow also slows the exchanges.
    is_far = 'slow_rank' in shares and sum(excess_s) > _FAR * sum(
        _own_s(r, *_OWN)
        for record, *_ in times.intervals
        for r in record.ranks
        if r.rank == slow.rank
    )
    return [
        Limit(
            name,
            shares[name],
            part.get(name),
            *((slow, since) if name == 'slow_rank' else (None, None)),
        )
        for name in sorted(
            shares, key=lambda key: (is_far and key == 'slow_rank', shares[key]), reverse=True
        )
    ]
