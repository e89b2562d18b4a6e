"""How long would it take on other nodes? From the time of a step that was measured, and epochs that a recipe declares.

A step on another layout takes the computing time of its images, and what does not shrink with them: a ring all-reduce of
all gradients over the slowest link, less what is hidden behind the backward pass, and a cost of every step on several
nodes. Pure.
"""
from dataclasses import dataclass

from mlperf_rn50.study.known import KnownSet, Recipe


@dataclass(frozen=True)
class Base:
    """What a prediction starts from: a step that was measured.

    Args:
        name: of the system or the measurement.
        source: where it comes from: a folder, a file, or a published round.
        num_nodes: of the layout that was measured.
        num_units: accelerators of all its nodes, or ranks where there are none.
        has_accelerators: whether units are accelerators.
        global_batch_size: images per step.
        step_s: a whole training step.
        exchange_s: what of the step is exchange that is not hidden, where it was measured; else 0.
        evaluation_s: one evaluation; None where it was not measured (a bench).
        outside_s: first epoch and gaps, on the clock; None where it was not measured.
        train_samples: images per epoch.
        dataset: None for ImageNet.
        known: the runs it comes from, whose recipe and epochs count; None for a bench.
    """

    name: str
    source: str
    num_nodes: int
    num_units: int
    has_accelerators: bool
    global_batch_size: int
    step_s: float
    exchange_s: float
    evaluation_s: float | None
    outside_s: float | None
    train_samples: int
    dataset: str | None
    known: KnownSet | None = None


@dataclass(frozen=True)
class Link:
    """What joins the nodes.

    Args:
        gbit_s: of the slowest link, per second and direction.
        exchange_bytes: of all gradients.
        is_hidden: whether the exchange runs behind the backward pass.
        source: who says so.
    """

    gbit_s: float
    exchange_bytes: int
    is_hidden: bool
    source: str


@dataclass(frozen=True)
class Layout:
    """What is predicted: nodes, units on each, and the recipe that is trained there."""

    num_nodes: int
    units_per_node: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return f'{self.num_nodes}x{self.units_per_node}'

    @property
    def num_units(self) -> int:
        return self.num_nodes * self.units_per_node


@dataclass(frozen=True)
class Prediction:
    """What a layout would take; refusal says why there is none, and the rest is None then.

    Args:
        epochs: to the target.
        epochs_source: who says so.
        compute_s: of a step.
        exchange_s: of a step, whole.
        hidden_s: what of it is hidden behind computing.
        other_s: what a step on several nodes costs beside.
        minutes: time to train.
        low_minutes: lower end of the interval that holds four times out of five.
        high_minutes: its upper end.
        doubts: what weakens it.
    """

    layout: Layout
    refusal: str | None = None
    epochs: float | None = None
    epochs_source: str = ''
    compute_s: float | None = None
    exchange_s: float | None = None
    hidden_s: float | None = None
    other_s: float | None = None
    minutes: float | None = None
    low_minutes: float | None = None
    high_minutes: float | None = None
    doubts: tuple[str, ...] = ()

    @property
    def step_s(self) -> float | None:
        parts = (self.compute_s, self.exchange_s, self.other_s)
        return None if None in parts else sum(parts) - (self.hidden_s or 0.0)  # type: ignore[arg-type]

    @property
    def images_per_s(self) -> float | None:
        return self.layout.recipe.global_batch_size / self.step_s if self.step_s else None
