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
from typing import NamedTuple

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why.shortage import Shortage, find_shortage
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.elapsed import Resume, gaps_of, union_s
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.runfolder.records import (
    EndRecord,
    MetricsRecord,
    NetworkRecord,
    RanksRecord,
    RankSteps,
    ResumedRecord,
)
from mlperf_rn50.text import grouped

# Parts of waiting for images, and their names as the part of a verdict. There, `python` is the
# preparation of batches; as a phase, a part of the time and a verdict, it is the training loop.
INPUT = {'read': 'storage', 'decode': 'decoding', 'prepare': 'python'}
# Parts of the time outside the steps. rest: time on the clock that no other part explains.
OUTSIDE = ('evaluation', 'checkpoints', 'rest')
# Phases of a step in which a rank does not depend on the others, and all phases.
_OWN = ('data', 'python', 'compute', 'update')
_PHASES = (*_OWN, 'wait')

# Least share of the time of a part that is named; without a smaller one, a run is less than 1.1
# times as fast.
_LEAST_SHARE = 1 - 1 / 1.1
# Evaluation took 6 to 21 % on digits, where validation has a fourth of the training images.
_LEAST_EVALUATION = 0.3
# More than half of the time is no computation, so the run is not healthy.
_LEAST_OTHER = 0.5
# On CPUs, the cores that compute also move the gradients, so much exchange is normal, except over
# a link of less than 1 Gbit/s (here in bytes/s).
_LEAST_CPU_EXCHANGE, _SLOW_LINK = 0.3, 1.25e8
# A batch is small if a rank has fewer images per step than an accelerator in any published run that
# converged, and if so large a share of a step does not depend on the batch that twice the batch is
# at least a tenth faster.
_FEW_IMAGES, _LEAST_FIXED = 15, 0.2
# A lack of cores makes all times uneven. The least share of a part, and that of the time that does
# not depend on the batch, then rise to these.
_LEAST_SHORT, _LEAST_SHORT_FIXED = 0.25, 0.5
# Least share of the measured peak, of which ResNet-50 reached 63 % on digits and a CPU.
_LOW_PEAK = 0.06
# A slow rank is named before a larger part if it exceeds the others by this share of its own time.
_FAR = 1 / 3
# Steps are uneven if the median takes so many times as long as the fastest tenth of enough steps.
_LEAST_UNEVENNESS, _LEAST_STEPS = 1.9, 50
# Ratio of mean and median of a step in an interval that was slow only at its start.
_SLOW_START = 1.5
_UNKNOWN = NetworkRecord(0, 0.0, 0, 0)  # of a run that did not record it


class Interval(NamedTuple):
    """Time from an evaluation to the end of the next one."""

    record: RanksRecord
    rank: RankSteps  # the one that waits least
    parts: dict[str, float]  # seconds along the critical path
    first_epoch: int


@dataclass(frozen=True)
class Times:
    """Seconds of a run by part along its critical path. The parts add up to the clock."""

    parts: dict[str, float]
    intervals: Sequence[Interval]
    network: NetworkRecord
    is_cpu: bool
    has_sizes: bool  # whether images of several sizes are planned

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def num_steps(self) -> int:
        return sum(i.rank.num_steps for i in self.intervals)

    @property
    def num_hosts(self) -> int:
        return len({r.host for r in self.intervals[-1].record.ranks})

    @property
    def is_latency(self) -> bool:
        """Whether latency explains half of the exchange."""
        latency_s = sum((i.record.latency_s or 0.0) * i.rank.num_steps for i in self.intervals)
        return 2 * self.network.num_buckets * latency_s > self.parts['exchange']

    def _per_second(self, amount: float, seconds: float) -> float:
        """Return the rate of an amount per step in a time of all steps; 0 if it is unknown."""
        return amount * self.num_steps / seconds if seconds > 1e-9 else 0.0

    @property
    def _ring_bytes(self) -> float:
        """Bytes that a rank sends in a ring all-reduce of a step."""
        num_ranks = len(self.intervals[-1].record.ranks)
        return self.network.gradient_bytes * 2 * (num_ranks - 1) / num_ranks

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a rank while gradients are exchanged; 0 if unknown."""
        hidden_s = sum(i.rank.hidden_s for i in self.intervals)
        return self._per_second(self._ring_bytes, self.parts['exchange'] + hidden_s)

    @property
    def most_bandwidth(self) -> float:
        """Bytes/s of a rank if the backward pass had hidden no byte; 0 if unknown."""
        return self._per_second(self._ring_bytes, self.parts['exchange'])

    @property
    def flops_per_s(self) -> float:
        """Operations/s of a rank in forward and backward, which has twice those of forward; 0 if
        unknown."""
        forward = self.network.flops_per_image * self.network.local_batch_size
        return self._per_second(3 * forward, self.parts['compute'])

    @property
    def peak_share(self) -> float:
        peak = self.network.peak_flops_per_s
        return self.flops_per_s / peak if peak else 0.0


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run, and its share of the time."""

    # the verdict: stopped, the name of a Shortage, input, python, exchange, slow_rank, computation,
    # evaluation, checkpoints, batch, update, rest, uneven or healthy
    name: str
    share: float
    part: str | None = None  # of input, a value of INPUT; of exchange, host, link or latency
    rank: RankSteps | None = None  # the rank that the verdict names
    since: int | None = None  # first epoch in which a slow rank was slow
    shortage: Shortage | None = None
    also: 'Bottleneck | None' = None  # the next one of a run that lacked cores or was stopped

    @property
    def gain(self) -> float:
        return 1 / max(1 - self.share, 1e-3)


def _own_s(rank: RankSteps, *names: str) -> float:
    return sum(getattr(rank, f'{name}_s') for name in names)


def _interval_of(record: RanksRecord, first_epoch: int) -> Interval:
    rank = min(record.ranks, key=lambda r: r.wait_s)
    names = (*_PHASES, 'read', 'decode')
    # Version 0.5.0 did not record the critical path.
    paths = [r.critical_s for r in record.ranks if r.critical_s] or [
        {name: _own_s(rank, name) for name in names}
    ]
    s = {name: sum(path.get(name, 0.0) for path in paths) for name in names}
    parts = {
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
    return Interval(record, rank, parts, first_epoch)


def _logged_eval_s(log: Run, start_s: float) -> float:
    """Return the time of the evaluations that a log states, from start_s on."""
    return sum(
        e.stop_s - e.start_s
        for e in log.evaluations
        if e.start_s is not None and e.stop_s is not None and e.start_s >= start_s
    )


def _starts_slowly(intervals: Sequence[Interval]) -> bool:
    """Check whether the first interval was slow only at its start."""
    means = [_own_s(i.rank, *_PHASES) / i.rank.num_steps for i in intervals]
    spread_s = intervals[0].rank.spread_s
    usual_s = sum(spread_s.get(name, (0.0,))[0] for name in _PHASES)
    return (
        len(means) > 2
        and 0 < _SLOW_START * usual_s < means[0]
        and usual_s < _SLOW_START * max(means[1:])
    )


def _unmeasured(
    resumes: Sequence[Resume], recorded_s: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the times of preserved steps that no RanksRecord has, because it would have followed
    the checkpoint of a resume.

    recorded_s: times of all RanksRecords, in seconds since run_start.
    """
    found = []
    start_s = 0.0
    for resume in resumes:
        if resume.checkpoint_s is not None:
            covered = [t for t in recorded_s if start_s <= t <= resume.checkpoint_s]
            found.append((max([start_s, *covered]), resume.checkpoint_s))
        start_s = resume.resumed_s
    return [(a, b) for a, b in found if a < b]


def _intervals_of(records: Sequence[MetricsRecord]) -> tuple[list[Interval], float]:
    """Return the intervals of a run and the time of checkpoints after the last one."""
    by_epoch: dict[int, RanksRecord] = {}
    checkpoint_s = 0.0
    for record in records:
        if isinstance(record, RanksRecord):
            by_epoch.pop(record.epoch, None)  # the last record is the last of the dictionary
            by_epoch[record.epoch] = record
        elif isinstance(record, EndRecord):
            checkpoint_s = record.checkpoint_s
        elif isinstance(record, ResumedRecord):
            checkpoint_s = 0.0
    first_epochs = [1, *(epoch + 1 for epoch in by_epoch)]
    with_ranks = ((r, first) for r, first in zip(by_epoch.values(), first_epochs) if r.ranks)
    return [_interval_of(r, first) for r, first in with_ranks], checkpoint_s


def times_of(run: RunData) -> Times:
    """Return the times of a run, without a first interval that was slow only at its start, and
    without steps after the last evaluation, whose times are not known."""
    intervals, last_checkpoint_s = _intervals_of(run.preserved().records)
    if not intervals:
        action = 'resume it' if run.all(RanksRecord) else 'train with this version'
        if run.log and run.log.status == 'running':
            action = 'wait for the first one'
        raise UserError(
            f'{run.folder.metrics}: got no times of ranks, expected those of an evaluation; '
            f'{action}'
        )
    start_s = 0.0
    if _starts_slowly(intervals):
        start_s = intervals[0].record.time_s
        intervals = intervals[1:]
    parts = {name: sum(i.parts[name] for i in intervals) for name in intervals[0].parts}
    if run.log and not parts['evaluation']:  # early versions did not record it
        parts['evaluation'] = _logged_eval_s(run.log, start_s)
    parts['checkpoints'] += last_checkpoint_s
    # Lost training and times without training are no part.
    resumes = run.log.resumes if run.log else ()
    gaps = gaps_of(resumes)
    gaps += _unmeasured(resumes, [r.time_s for r in run.all(RanksRecord)])
    end_s = intervals[-1].record.time_s + last_checkpoint_s
    without = [(max(a, start_s), min(b, end_s)) for a, b in gaps if b > start_s and a < end_s]
    measured_s = end_s - start_s - union_s(without)
    parts['rest'] = max(measured_s - sum(parts.values()), 1e-9)
    return Times(
        parts,
        intervals,
        network=run.last(NetworkRecord) or _UNKNOWN,
        is_cpu=run.config is None or run.config.train.device == 'cpu',
        has_sizes=bool(run.config and run.config.data.sizes),
    )


def _excess_s(times: Times, rank: int, names: Sequence[str], is_short: bool) -> list[float]:
    """Return, by interval, by how much a rank exceeds the median of the other ranks in some phases.

    is_short: whether ranks lacked cores; their waits for cores then do not count.
    """
    excess_s = []
    for interval in times.intervals:
        own = {r.rank: _own_s(r, *names) for r in interval.record.ranks}
        if is_short:
            for r in interval.record.ranks:
                own[r.rank] -= r.ready_s.get('compute', (0.0, 0.0))[1]
        is_known = rank in own and len(own) > 1
        excess_s.append(own.pop(rank) - statistics.median(own.values()) if is_known else 0.0)
    return excess_s


def _stopped(times: Times) -> Bottleneck | None:
    """Return the rank that was stopped for the largest part of the time."""
    by_rank = grouped((r for i in times.intervals for r in i.record.ranks), lambda r: r.rank)
    stopped = max(
        by_rank.values(), key=lambda ranks: (sum(r.stopped_s for r in ranks), ranks[0].rank)
    )
    share = min(sum(r.stopped_s for r in stopped) / times.total_s, 1.0)
    return Bottleneck('stopped', share, rank=stopped[-1]) if share > _LEAST_SHARE else None


def _unevenness(times: Times) -> float:
    """Return the ratio of a usual and a fast computation of a step; 1 if they are not known or
    differ by plan."""
    counts = times.intervals[-1].record.histograms.get('compute', [])
    ends = list(accumulate(counts))
    if not counts or ends[-1] < _LEAST_STEPS or times.has_sizes:
        return 1.0
    fast, usual = (bisect_left(ends, part * ends[-1]) for part in (0.1, 0.5))
    return 2.0 ** min((usual - fast) / 4, 100)


def find_bottleneck(times: Times) -> Bottleneck:
    """Return what limits a run: a stopped rank, a lack of cores, or the largest part above its
    threshold."""
    if stopped := _stopped(times):
        return stopped
    parts, total_s = times.parts, times.total_s
    shortage = find_shortage([i.record for i in times.intervals]) if times.is_cpu else None
    waited = shortage.waited if shortage else 0.0

    # A link is thin if its rate limits the exchange, not its latency or the cores that move the
    # gradients.
    is_slow = 0 < times.most_bandwidth < _SLOW_LINK * (1 - waited)
    is_thin = is_slow and times.num_hosts > 1 and not times.is_latency

    # The share of the time that ranks lost by waiting for cores.
    needed = ('compute', 'update', 'evaluation', *([] if is_thin else ['exchange']))
    lacking = waited * sum(parts[name] for name in needed) / total_s
    if lacking < _LEAST_SHARE:
        lacking = 0.0

    large = _largest_part(times, is_thin, lacking)
    if shortage and lacking:
        lack = Bottleneck(shortage.name, lacking, rank=shortage.rank, shortage=shortage)
        if large and large.share > 2 * lack.share:
            return replace(large, also=lack)
        return replace(lack, also=large)
    if large:
        return large

    # No part is large: the computation itself.
    computing = parts['compute'] / total_s
    if 0 < times.peak_share < _LOW_PEAK and 2 * parts['compute'] > total_s:
        return Bottleneck('computation', computing * (1 - times.peak_share))
    if (ratio := _unevenness(times)) > _LEAST_UNEVENNESS:
        return Bottleneck('uneven', computing * (1 - 1 / ratio))
    return Bottleneck('healthy', max(s for name, s in parts.items() if name != 'compute') / total_s)


def _slow_since(times: Times, excess_s: Sequence[float]) -> int | None:
    """Return the first epoch since which a rank was slow without a break; None if it is not."""
    since = None
    for interval, s in zip(times.intervals, excess_s):
        if s <= _LEAST_SHARE * _own_s(interval.rank, *_PHASES):
            since = None
        elif since is None:
            since = interval.first_epoch
    return since


def _fixed_s(times: Times, is_thin: bool, is_short: bool) -> float:
    """Return the time that does not depend on the batch, 0 unless a larger batch would save much of
    it."""
    parts = times.parts
    is_small = 0 < times.network.local_batch_size < _FEW_IMAGES
    fixed_s = parts['update'] + parts['python'] + parts['exchange']
    if not is_small or is_thin or 2 * parts['python'] >= fixed_s:
        return 0.0
    step_s = sum(s for name, s in parts.items() if name not in OUTSIDE)
    is_slowed = is_short and parts['exchange'] > parts['update']
    least = _LEAST_SHORT_FIXED if is_slowed else _LEAST_FIXED
    return fixed_s if fixed_s > least * step_s else 0.0


def _largest_part(times: Times, is_thin: bool, lacking: float) -> Bottleneck | None:
    """Return the largest part of the time above its threshold; None if there is none.

    lacking: share of the time that is due to a lack of cores, which makes all parts uneven, and
    exchanges slow.
    """
    parts, total_s = times.parts, times.total_s
    is_short = lacking > 0
    # the rank for which the others waited longest, and its excess of each interval
    slow = max(
        (i.rank for i in times.intervals),
        key=lambda r: sum(_excess_s(times, r.rank, _OWN, is_short)),
    )
    excess_s = _excess_s(times, slow.rank, ('compute', 'update'), is_short)

    # The parts above their thresholds.
    seconds = {
        'input': sum(parts[name] for name in INPUT),
        'python': parts['python'],
        'slow_rank': sum(excess_s),
        'checkpoints': parts['checkpoints'],
        'evaluation': parts['evaluation'],
        'batch': _fixed_s(times, is_thin, is_short),
        'exchange': parts['exchange'],
        'update': parts['update'],
        'rest': parts['rest'],
    }
    least = min(max(lacking / 2, _LEAST_SHARE), _LEAST_SHORT)
    exceptions = {
        'evaluation': _LEAST_EVALUATION + least - _LEAST_SHARE,
        'update': _LEAST_OTHER,
        'rest': _LEAST_OTHER,
    }
    if times.is_cpu and not is_thin:
        exceptions['exchange'] = _LEAST_CPU_EXCHANGE + 2 * lacking
    shares = {
        name: min(s / total_s, 1.0)
        for name, s in seconds.items()
        if s > exceptions.get(name, least) * total_s
    }

    if not shares:
        return None
    # A rank whose cores are slow also slows the exchanges, so it comes first.
    own_s = sum(
        _own_s(r, *_OWN) for i in times.intervals for r in i.record.ranks if r.rank == slow.rank
    )
    name = max(shares, key=shares.__getitem__)
    if 'slow_rank' in shares and sum(excess_s) > _FAR * own_s:
        name = 'slow_rank'
    if name == 'slow_rank':
        return Bottleneck(name, shares[name], rank=slow, since=_slow_since(times, excess_s))
    part = None
    if name == 'input' and times.network.num_buckets:
        part = INPUT[max(INPUT, key=parts.__getitem__)]
    if name == 'exchange':
        part = 'latency' if times.is_latency else 'link'
        if times.is_cpu and times.num_hosts == 1:
            part = 'host'
    return Bottleneck(name, shares[name], part)
