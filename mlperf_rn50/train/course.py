"""The evaluations of a run beside those of reference runs, which rank 0 reads before anything starts."""
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlperf_rn50.config import Config
from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.metrics import read_curve
from mlperf_rn50.study import reference as references
from mlperf_rn50.study.known import KnownSet, Recipe, known_of, load_published
from mlperf_rn50.study.recipe_differences import global_batch_size, is_imagenet
from mlperf_rn50.study.reference import Band, Reference
from mlperf_rn50.study.systems import load_systems
from mlperf_rn50.train import events
from mlperf_rn50.train.plan import Plan


def _recipe_of(config: Config, world_size: int) -> Recipe:
    return references.recipe_of(config, global_batch_size(config, world_size) or world_size)


def _named_sets(paths: Sequence[str]) -> list[KnownSet]:
    """Return the sets under some paths but those that are refused; raise UserError where there is none."""
    systems = load_systems([Path(p) for p in paths])
    found = [known for known in map(known_of, systems) if known]
    refused = next((s for s in systems if s.refusal), None)
    if refused and not found:
        raise UserError(f'run.reference: expected runs that are a set, got {refused.folder}: {refused.refusal}')
    return found


def find_reference(config: Config, world_size: int) -> Reference | None:
    """Return the reference of a run; None where none was named and no published set has its recipe.

    Raises:
        UserError: the named runs cannot be read, or compared with.
    """
    recipe = _recipe_of(config, world_size)
    if config.run.reference:
        return references.find_named(recipe, references.dataset_of(config), config.data.num_val,
                                     _named_sets(config.run.reference), load_published())
    return references.find_published(recipe, load_published()) if is_imagenet(config) else None


@dataclass
class Course:
    """The evaluations of a run so far, and their reference."""

    reference: Reference | None
    bands: dict[int, Band] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    is_behind: bool = False

    def evaluated(self, epochs: int, accuracy: float, time_s: float) -> events.Compared | None:
        """Return an evaluation, Top-1 as a fraction, beside the reference; None without one."""
        if self.reference is None:
            return None
        self.curve.append((epochs, accuracy))
        standing = references.stand(self.reference, self.bands, self.curve, time_s)
        was_behind, self.is_behind = self.is_behind, standing.is_behind
        return events.Compared(standing, standing.is_behind and not was_behind)


def open_course(reference: Reference | None, plan: Plan, metrics: Path, num_epochs: int) -> Course:
    """Return the course of a run that resumes after a number of epochs; earlier evaluations are in its metrics."""
    if reference is None:
        return Course(None)
    curve = [(epoch, accuracy) for epoch, accuracy in read_curve(metrics) if epoch <= num_epochs]
    planned = [e + 1 for e in range(plan.max_epochs) if plan.is_eval_epoch(e)]
    bands = references.band(reference, sorted({*planned, *(epoch for epoch, _ in curve)}))
    return Course(reference, bands, curve, references.is_behind(bands, curve))


def tell_reference(course: Course, config: Config, world_size: int) -> events.ReferenceFound | None:
    """Return the event of the reference at the start; None where none is to be expected."""
    if course.reference:
        return events.ReferenceFound(course.reference, list(course.bands.values()),
                                     references.reached(course.reference), references.introduce(course.reference))
    if not is_imagenet(config):
        return None
    recipe = references.describe(_recipe_of(config, world_size))
    return events.ReferenceFound(None, [], [], f'no reference: no published set has this recipe ({recipe}) or a like '
                                               'one; --run.reference PATH names runs')
