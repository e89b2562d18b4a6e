"""What does a run cost? Node-hours, money where a price is given, and energy where it was measured. Pure."""
import statistics
from collections.abc import Sequence

from mlperf_rn50.mllog.run import Run
from mlperf_rn50.mllog.sidecar.energy import KINDS, Energy

_JOULES_PER_KWH = 3.6e6


def node_hours(seconds: float, num_nodes: int) -> float:
    """Hours of all nodes."""
    return seconds / 3600 * num_nodes


def cost(seconds: float, num_nodes: int, price_per_node_hour: float) -> float:
    """Money for all nodes, in the currency of the price."""
    return node_hours(seconds, num_nodes) * price_per_node_hour


def kwh(joules: float | None) -> float | None:
    """Joules in kilowatt-hours."""
    return None if joules is None else joules / _JOULES_PER_KWH


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None where one is missing, or there are none."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def mean_energy(energies: Sequence[Energy]) -> Energy:
    """The mean of some runs; a kind counts only where all of them measured it."""
    reasons = {kind: next(e.reasons[kind] for e in energies if kind in e.reasons)
               for kind in KINDS if any(kind in e.reasons for e in energies)}
    return Energy(
        _mean([e.seconds for e in energies]) or 0.0, _mean([e.cpu_joules for e in energies]),
        _mean([e.gpu_joules for e in energies]), reasons)


def images_per_joule(runs: Sequence[Run], energy: Energy) -> float | None:
    """Training images per joule of what was measured; None where nothing was, or epochs are not known."""
    images = _mean([_images(r) for r in runs])
    return images / energy.joules if energy.joules and images is not None else None


def _images(run: Run) -> float | None:
    """Images that a run trained on: those of all its epochs."""
    epochs = run.epochs_to_converge or run.last_epoch
    return epochs * run.train_samples if epochs and run.train_samples else None
