"""Cost of runs: node-hours, money and energy. Pure functions."""
import statistics
from collections.abc import Sequence

from mlperf_rn50.mllog.run import Run
from mlperf_rn50.mllog.sidecar.energy import KINDS, Energy

_JOULES_PER_KWH = 3.6e6


def node_hours(seconds: float, num_nodes: int) -> float:
    return seconds / 3600 * num_nodes


def cost_of(hours: float | None, price_per_node_hour: float | None) -> float | None:
    """Return the cost of node-hours, in the currency of the price, or None if either is unknown."""
    return None if hours is None or price_per_node_hour is None else hours * price_per_node_hour


def kwh(joules: float | None) -> float | None:
    return None if joules is None else joules / _JOULES_PER_KWH


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no values or one is missing."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def mean_energy(energies: Sequence[Energy]) -> Energy:
    """Return the mean energy of runs. CPUs and GPUs are left out unless all runs measured them."""
    reasons = {kind: next(e.reasons[kind] for e in energies if kind in e.reasons)
               for kind in KINDS if any(kind in e.reasons for e in energies)}
    return Energy(_mean([e.seconds for e in energies]) or 0.0, _mean([e.cpu_joules for e in energies]),
                  _mean([e.gpu_joules for e in energies]), reasons)


def images_per_joule(runs: Sequence[Run], energy: Energy) -> float | None:
    """Return training images per measured joule, or None if the energy or a number of epochs or images is unknown."""
    epochs = [r.epochs_to_converge or r.last_epoch for r in runs]
    images = _mean([e * r.train_samples if e and r.train_samples else None for e, r in zip(epochs, runs)])
    return images / energy.joules if energy.joules and images is not None else None
