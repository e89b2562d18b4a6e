"""Times of all ranks since the last evaluation, for a RanksRecord, and traces of some steps."""

import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
from msgspec.structs import replace

from mlperf_rn50.runfolder.records import RanksRecord, RankSteps, StepSpans
from mlperf_rn50.train.comm.cores import CoreMeter, count_others
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import find_stragglers
from mlperf_rn50.train.comm.step_timer import COLUMNS, PHASES, StepTimer
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

_NUM_BINS = 100  # of a histogram, up to 282 s
_NUM_LATENCIES = 5
_NUM_STEPS = 20  # of a trace on request


class RankTimes:
    """Times of this rank; own: its rank and host.

    checkpoint_s: time of checkpoints since the last report. is_trace_requested: on rank 0, whether
    a user requests a trace, until the loop has passed this on to all ranks.
    """

    def __init__(
        self,
        comm: Comm,
        timer: StepTimer,
        own: dict[str, Any],
        request_file: Path,
        heartbeat: Heartbeat,
    ):
        self._comm, self._timer, self._own = comm, timer, own
        self._request_file, self._heartbeat = request_file, heartbeat
        self._cores = CoreMeter(comm.threads)
        self._attempt_s = comm.from_rank_0(time.time)
        self._bins = np.zeros((len(PHASES), _NUM_BINS), int)
        self.is_trace_requested = False
        self.checkpoint_s = 0.0

    def start(self) -> None:
        """Start the interval of the first report, when the clock of the run starts."""
        self._cores.start()
        self._heartbeat.take_stopped_s()

    def report(self, epoch: int, time_s: float, eval_s: float) -> RanksRecord:
        """Return the times since the last evaluation, with the ranks only on rank 0; eval_s: of the
        one that ends."""
        comm, times = self._comm, self._timer.take()
        if comm.world_size == 1:
            times = spread_updates(times)
        own = {
            **self._own,
            **self._cores.take(),
            'stopped_s': self._heartbeat.take_stopped_s(),
            **sum_times(times, comm.minimum(times[:, PHASES.index('wait')])),
        }
        self._bins += count_bins(times)
        bins = np.reshape(comm.sum(self._bins.ravel().tolist()), self._bins.shape).tolist()
        checkpoint_s, self.checkpoint_s = self.checkpoint_s, 0.0
        ranks = count_others(comm.gather_object(own, only_on_rank_0=True))
        return RanksRecord(
            epoch=epoch + 1,
            time_s=time_s,
            ranks=[RankSteps(**rank) for rank in ranks],
            stragglers=find_stragglers(ranks),
            eval_s=eval_s,
            checkpoint_s=checkpoint_s,
            latency_s=measure_latency(comm),
            histograms=dict(zip(PHASES, bins)),
        )

    def find_trace_request(self) -> None:
        """Look, on rank 0, for the file in the run folder that requests a trace, and remove it."""
        if self._comm.rank == 0:
            with suppress(OSError):
                if not self._request_file.stat().st_size:  # otherwise a file of the user
                    self._request_file.unlink()
                    self.is_trace_requested = True

    def start_trace(self) -> None:
        """Trace the next steps; all ranks call this after the same step."""
        self._timer.start_trace(_NUM_STEPS)

    def take_trace(self, is_end: bool = False) -> list[StepSpans]:
        """Return the traced steps once all are done, or as they are at the end of the run."""
        spans = self._timer.take_trace(is_end)
        return [replace(s, attempt_s=self._attempt_s) for s in spans]


def spread_updates(times: np.ndarray) -> np.ndarray:
    """Return the times of a single rank, whose sampled steps alone have the updates after the
    backward pass.

    In the other steps, they are part of the backward pass, and get the same share of both.
    """
    result = times.copy()
    is_sampled = ~np.isnan(times[:, COLUMNS.index('hidden')])
    both = [PHASES.index('compute'), PHASES.index('update')]
    sums = times[is_sampled][:, both].sum(0)
    if sums.sum():
        others = times[~is_sampled][:, both].sum(1)
        result[np.ix_(~is_sampled, both)] = np.outer(others, sums / sums.sum())
    return result


def sum_times(times: np.ndarray, least_wait_s: np.ndarray) -> dict[str, Any]:
    """Return the times of RankSteps for one or more steps, in whole microseconds; hidden is scaled
    to all of them.

    least_wait_s: minimum over ranks of each step's wait, which moves bytes; the rest waits for the
    slowest rank.
    """
    slow_rank_s = times[:, PHASES.index('wait')] - least_wait_s
    critical_s = times[slow_rank_s <= 0, :-1].sum(0).round(6).tolist()
    result: dict[str, Any] = {
        'num_steps': len(times),
        'spread_s': {},
        'critical_s': dict(zip(COLUMNS, critical_s)),
    }
    for name, column in zip((*COLUMNS, 'slow_rank'), [*times.T, slow_rank_s]):
        known = column[~np.isnan(column)]
        if len(known):
            result[f'{name}_s'] = round(len(column) * float(known.mean()), 6)
            result['spread_s'][name] = np.percentile(known, [50, 99, 100]).round(6).tolist()
    return result


def count_bins(times: np.ndarray) -> np.ndarray:
    """Return the histogram of each phase as in RanksRecord, (PHASES, bins)."""
    phases = np.maximum(times.T[: len(PHASES)], 1e-5)
    bins = np.minimum(4 * np.log2(phases / 1e-5), _NUM_BINS - 1).astype(int)
    return np.stack([np.bincount(b, minlength=_NUM_BINS) for b in bins])


def measure_latency(comm: Comm) -> float | None:
    """Return the median seconds of an exchange of one number among all ranks; None for a single
    rank."""
    if comm.world_size == 1:
        return None
    stamps = []
    for _ in range(1 + _NUM_LATENCIES):
        comm.barrier()
        stamps.append(time.monotonic())
    return median_low(b - a for a, b in pairwise(stamps))
