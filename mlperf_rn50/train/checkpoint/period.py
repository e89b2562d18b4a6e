"""Periods of checkpoints, and the one that costs least: the time of checkpoints and that of
repeated training.

Sources: Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974;
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
Generation Computer Systems 22 (3), 2006.
"""

import math
import statistics
from dataclasses import dataclass, field

from mlperf_rn50.text import plural

# Time between faults of a rank, before a run has had one: 419 unexpected interruptions in 54 days
# on 16,384 GPUs. Source: Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.4.
PRIOR_S = 54 * 86_400 * 16_384 / 419
FIRST_S = 30.0  # period until the cost of a checkpoint is known
# Checkpoints may always take a thousandth of the training: a site may have more faults than the
# prior says, and the first one of a cheap checkpoint should not cost an hour.
_MAX_RATIO = 1000.0
_CHANGE = 1.5  # factor between two periods that are reported


def is_due(period: int, number: int) -> bool:
    """Check whether a number of steps or epochs is a multiple of a period; a period of 0 is never
    due."""
    return bool(period) and number % period == 0


def between_faults_s(trained_s: float, num_faults: int, num_ranks: int) -> float:
    """Return the mean time between faults; trained_s: time in which the ranks trained."""
    return trained_s / num_faults if num_faults else PRIOR_S / num_ranks


def best_period_s(cost_s: float, between_s: float) -> float:
    """Return the training between two checkpoints for which a run is expected to take least time.

    cost_s: in which training waits for a checkpoint. between_s: mean time between faults.
    """
    ratio = cost_s / (2 * between_s)
    if ratio >= 1:
        return between_s
    young_s = math.sqrt(2 * cost_s * between_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass
class AutoPeriod:
    """Period of the checkpoints of a run, which follows the faults and the costs that are known.

    num_faults: before this attempt. down_s: time without training, after faults and stops. costs_s:
    waits of training for a checkpoint. Times now_s are since run_start.
    """

    num_ranks: int
    num_faults: int
    down_s: float
    costs_s: list[float] = field(default_factory=list)
    reported_s: float = math.inf

    def between_s(self, now_s: float) -> float:
        return between_faults_s(max(now_s - self.down_s, 1.0), self.num_faults, self.num_ranks)

    def period_s(self, now_s: float) -> float:
        if not self.costs_s:
            return FIRST_S
        cost_s = statistics.fmean(self.costs_s)
        return min(best_period_s(cost_s, self.between_s(now_s)), _MAX_RATIO * cost_s)

    def news(self, now_s: float) -> str:
        """Return a period that differs from the last one reported, with its reasons; else ''."""
        period_s = self.period_s(now_s)
        is_same = self.reported_s / _CHANGE < period_s < self.reported_s * _CHANGE
        if is_same or not self.costs_s:
            return ''
        self.reported_s = period_s
        between_s = self.between_s(now_s)
        faults = f'{plural(self.num_faults, "fault")} so far, one per {between_s:.0f} s'
        if not self.num_faults:
            hours = f'{between_s / 3600:,.0f} h for {plural(self.num_ranks, "rank")}'
            faults = f'no fault so far, one per {hours} assumed'
        cost = f'{statistics.fmean(self.costs_s):.2g} s per checkpoint'
        return f'checkpoint every {period_s:.0f} s (checkpoint.period_s: auto; {cost}; {faults})'
