"""Comparison of a run's evaluations with reference runs, which rank 0 reads before training
starts."""

from dataclasses import dataclass, field
from pathlib import Path

from mlperf_rn50.analysis.recipe import band, reference
from mlperf_rn50.analysis.recipe.band import Band
from mlperf_rn50.analysis.recipe.differences import is_imagenet
from mlperf_rn50.analysis.recipe.reference import Reference
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.config import Config
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.sidecar.metrics import read_curve
from mlperf_rn50.runfolder.records import BandRecord, ReferenceRecord
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.plan import Plan


def find_reference(config: Config, batch: int) -> Reference | None:
    """Return the reference runs for a run, or None if there are none; raise UserError if
    run.reference is unusable.

    batch: images per step for which the learning rate is configured.
    """
    recipe = reference.recipe_of(config, batch)
    if not config.run.reference:
        return reference.find_published(recipe, load_published()) if is_imagenet(config) else None
    named = load_run_sets([Path(p) for p in config.run.reference])
    usable = [s for s in named if s.has_recipe]
    refused = next((s for s in named if s.reasons), None)
    if refused and not usable:
        raise UserError(
            f'run.reference: expected a run set, got {refused.folder}: {"; ".join(refused.reasons)}'
        )
    return reference.find_named(
        recipe, reference.dataset_of(config), config.data.num_val, usable, load_published()
    )


@dataclass
class ReferenceComparison:
    """Completed evaluations of a run, and the reference runs to compare them with."""

    reference: Reference | None
    bands: dict[int, Band] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    is_behind: bool = False

    def compare(self, epochs: int, accuracy: float, time_s: float) -> events.Compared | None:
        """Compare a Top-1 accuracy, a fraction, with the reference runs; return None if there are
        none."""
        if self.reference is None:
            return None
        self.curve.append((epochs, accuracy))
        standing = band.standing_of(self.reference, self.bands, self.curve, time_s)
        self.is_behind = standing.behind
        return events.Compared(standing)


def open_comparison(
    found: Reference | None, plan: Plan, metrics: Path, num_epochs: int
) -> ReferenceComparison:
    """Return the comparison of a run after num_epochs, which includes the earlier evaluations in
    its metrics.jsonl."""
    if found is None:
        return ReferenceComparison(None)
    curve = [(epoch, accuracy) for epoch, accuracy in read_curve(metrics) if epoch <= num_epochs]
    bands = band.band(found, sorted({*plan.eval_epochs, *(epoch for epoch, _ in curve)}))
    return ReferenceComparison(found, bands, curve, band.is_behind(bands, curve))


def reference_event(
    comparison: ReferenceComparison, config: Config, batch: int
) -> events.ReferenceFound | None:
    """Return the event that reports the reference runs or, on ImageNet, that there are none;
    otherwise return None."""
    found = comparison.reference
    if not found and not is_imagenet(config):
        return None
    if not found:
        recipe = reference.describe_recipe(reference.recipe_of(config, batch))
        return events.ReferenceFound(
            ReferenceRecord(
                text=f'no reference: no published set has this recipe ({recipe}) or a similar one; '
                'use --run.reference PATH'
            )
        )
    ends = band.target_epochs(found)
    bands = [
        BandRecord(b.epoch, b.point, mean=b.mean, low=b.low, high=b.high, num_runs=len(b.values))
        for b in comparison.bands.values()
    ]
    return events.ReferenceFound(
        ReferenceRecord(
            how=found.how,
            num_reference=found.num_runs,
            sources=[reference.set_name(s) for s in found.sets],
            target=found.recipe.target_accuracy,
            reference_epochs=(ends[0], ends[-1]) if ends else None,
            band=bands,
            text=reference.introduce(found),
        )
    )
