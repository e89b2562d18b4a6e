"""Times of all ranks since the last evaluation, for a RanksRecord."""
import time
from itertools import pairwise
from statistics import median_low
from typing import Any

import numpy as np

from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.step_timer import COLUMNS, PHASES, StepTimer

_NUM_BINS = 100  # of a histogram, up to 282 s
_NUM_LATENCIES = 5


class RankTimes:
    """Times of this rank; own: its rank, host and cores. checkpoint_s: time of checkpoints since the last report."""

    def __init__(self, comm: Comm, timer: StepTimer, own: dict[str, Any]):
        self._comm, self._timer, self._own = comm, timer, own
        self._bins = np.zeros((len(PHASES), _NUM_BINS), int)
        self.checkpoint_s = 0.0

    def report(self, eval_s: float) -> dict[str, Any]:
        """Return fields of a RanksRecord, with the ranks only on rank 0; eval_s: time of the evaluation that ends."""
        comm, times = self._comm, self._timer.take()
        own = {**self._own, **sum_times(times, comm.minimum(times[:, PHASES.index('wait')]))}
        self._bins += count_bins(times)
        bins = np.reshape(comm.sum(self._bins.ravel().tolist()), self._bins.shape).tolist()
        checkpoint_s, self.checkpoint_s = self.checkpoint_s, 0.0
        return {'ranks': comm.gather_object(own, only_on_rank_0=True), 'eval_s': eval_s, 'checkpoint_s': checkpoint_s,
                'latency_s': measure_latency(comm), 'histograms': dict(zip(PHASES, bins))}


def sum_times(times: np.ndarray, least_wait_s: np.ndarray) -> dict[str, Any]:
    """Return the times of RankSteps for one or more steps, in whole microseconds; hidden is scaled to all of them.

    least_wait_s: minimum over ranks of each step's wait, which moves bytes; the rest waits for the slowest rank.
    """
    slow_rank_s = times[:, PHASES.index('wait')] - least_wait_s
    result: dict[str, Any] = {'num_steps': len(times), 'spread_s': {}}
    for name, column in zip((*COLUMNS, 'slow_rank'), [*times.T, slow_rank_s]):
        known = column[~np.isnan(column)]
        if len(known):
            result[f'{name}_s'] = round(len(column) * float(known.mean()), 6)
            result['spread_s'][name] = np.percentile(known, [50, 99, 100]).round(6).tolist()
    return result


def count_bins(times: np.ndarray) -> np.ndarray:
    """Return the histogram of each phase as in RanksRecord, (PHASES, bins)."""
    bins = 4 * np.log2(np.maximum(times[:, :len(PHASES)], 1e-5) / 1e-5)
    return np.stack([np.bincount(b, minlength=_NUM_BINS) for b in np.minimum(bins.T, _NUM_BINS - 1).astype(int)])


def measure_latency(comm: Comm) -> float | None:
    """Return the median seconds of an exchange of one number among all ranks; None for a single rank."""
    if comm.world_size == 1:
        return None
    stamps = []
    for _ in range(1 + _NUM_LATENCIES):
        comm.barrier()
        stamps.append(time.monotonic())
    return median_low(b - a for a, b in pairwise(stamps))
