"""Times of all ranks since the last evaluation, for a RanksRecord, and traces of some steps."""
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from mlperf_rn50.files import read_text, write_atomically
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.system.launcher_env import print_stderr, rank_name
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.step_timer import COLUMNS, PHASES, StepTimer
from mlperf_rn50.train.options import MAX_TRACED_STEPS

_NUM_BINS = 100  # of a histogram, up to 282 s
_NUM_LATENCIES = 5
_DEFAULT_STEPS = 20  # of a trace on request


class RankTimes:
    """Times of this rank; own: its rank, host and cores.

    checkpoint_s: time of checkpoints since the last report. request: number of steps for which a trace is requested.
    """

    def __init__(self, comm: Comm, timer: StepTimer, own: dict[str, Any], folder: RunFolder):
        self._comm, self._timer, self._own, self._folder = comm, timer, own, folder
        self.request = 0
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

    def find_request(self) -> None:
        """Look, on rank 0, for a request in the run folder, which the loop passes on to all ranks."""
        if self._comm.rank == 0:
            self.request = self.request or take_request(self._folder.trace_request)

    def trace(self, num_steps: int = 0, is_end: bool = False) -> None:
        """Trace the next steps, if any; write a trace once it is complete, or as it is at the end of the run."""
        if num_steps:
            self._timer.start_trace(num_steps)
        if spans := self._timer.take_trace(is_end):  # in a thread, because storage may be slow
            threading.Thread(target=write_trace, args=(self._folder.trace(self._comm.rank), spans)).start()


def take_request(path: Path) -> int:
    """Return the number of steps in a file that requests a trace, and remove the file; 0 without a file."""
    try:
        text = read_text(path, 100).strip()
        path.unlink()
    except (OSError, ValueError):
        return 0
    return min(int(text), MAX_TRACED_STEPS) if text.isdecimal() else _DEFAULT_STEPS


def write_trace(path: Path, spans: list[StepSpans]) -> None:
    """Write the traced steps of a rank, replacing an earlier trace. An error does not end the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the run folder may be on a local disk of each node
        write_atomically(path, ''.join(f'{encode(s)}\n' for s in spans))
    except OSError as e:
        print_stderr(f'mlperf-rn50: {rank_name()}: {path}: {e.strerror}; the trace is not written')


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
