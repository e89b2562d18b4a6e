"""A prediction and what it starts from: base, link, epochs, costs, layout."""
from dataclasses import dataclass

from mlperf_rn50.analysis.recipe.reference import has_same_recipe
from mlperf_rn50.analysis.sets.cost import node_hours
from mlperf_rn50.analysis.sets.run_set import KnownSet, Recipe


@dataclass(frozen=True)
class Base:
    """A step that was measured.

    Args:
        num_units: accelerators of all its nodes, or ranks where there are none.
        exchange_s: exchange that is not hidden, where it was measured; else 0.
        evaluation_s: one evaluation; None where it was not measured (a bench).
        outside_s: first epoch and gaps, on the clock; None where it was not measured.
        dataset: None for ImageNet.
        known: the runs it comes from; None for a bench.
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

    @property
    def unit(self) -> str:
        """What shares the work."""
        return 'accelerator' if self.has_accelerators else 'rank'

    @property
    def local_batch_size(self) -> float:
        return self.global_batch_size / self.num_units


@dataclass(frozen=True)
class Link:
    """The slowest link between nodes; gbit_s: per direction, is_hidden: whether it runs behind the backward pass."""

    gbit_s: float
    exchange_bytes: int
    is_hidden: bool
    source: str


# What is supposed between the nodes of published systems: one port of InfiniBand EDR or 100 Gbit/s Ethernet stands for
# all of a node's. Gradients of ResNet-50: 25.56 million, of 2 bytes as these systems exchange them.
PUBLISHED_LINK = Link(100.0, 51_000_000, False, 'one port of 100 Gbit/s, float16 gradients, nothing hidden')


@dataclass(frozen=True)
class Epochs:
    """Epochs to the target, with the interval of four out of five, and their source."""

    mean: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Costs:
    """Costs of other systems beside computing and exchange; low and high hold four out of five.

    Args:
        outside_s: what the first epoch takes more, and gaps, on several nodes; None: as the base.
        epochs_low: epochs of those that converged early, as a share of what their schedule leaves room for.
    """

    step_s: float
    step_spread_s: float
    outside_s: float | None
    outside_low_s: float
    outside_high_s: float
    epochs_low: float
    source: str


NO_COSTS = Costs(0.0, 0.0, None, 0.0, 0.0, 1.0, 'none: the exchange is what was measured')


@dataclass(frozen=True)
class Layout:
    """Nodes, units on each, and a recipe; epochs: where they are known better than by its schedule."""

    num_nodes: int
    units_per_node: int
    recipe: Recipe
    epochs: Epochs | None = None

    @property
    def name(self) -> str:
        return f'{self.num_nodes}x{self.units_per_node}'

    @property
    def num_units(self) -> int:
        return self.num_nodes * self.units_per_node

    @property
    def local_batch_size(self) -> float:
        return self.recipe.global_batch_size / self.num_units


@dataclass(frozen=True)
class Prediction:
    """The step and the minutes of a layout; with the reason of a refusal, or without known epochs, some are None.

    Args:
        other_s: costs of a step on several nodes beside computing and exchange.
        low_minutes: lower end of the interval that holds four times out of five.
        measured: a set of this layout and batch, perhaps of another recipe; None where none was measured.
    """

    base: Base
    layout: Layout
    refusal: str | None = None
    epochs: Epochs | None = None
    compute_s: float | None = None
    exchange_s: float | None = None
    hidden_s: float | None = None
    other_s: float | None = None
    minutes: float | None = None
    low_minutes: float | None = None
    high_minutes: float | None = None
    doubts: tuple[str, ...] = ()
    recipe_source: str = ''
    measured: KnownSet | None = None

    @property
    def step_s(self) -> float | None:
        parts = (self.compute_s, self.exchange_s, self.other_s)
        return None if None in parts else sum(parts) - (self.hidden_s or 0.0)  # type: ignore[arg-type]

    @property
    def images_per_s(self) -> float | None:
        return self.layout.recipe.global_batch_size / self.step_s if self.step_s else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The minutes that hold four times out of five."""
        return None if self.low_minutes is None or self.high_minutes is None else (self.low_minutes, self.high_minutes)

    @property
    def efficiency(self) -> float | None:
        """Images per second of an accelerator or rank, as a share of the base's."""
        rate, base = self.images_per_s, self.base
        if rate is None:
            return None
        return rate / self.layout.num_units / (base.global_batch_size / base.step_s / base.num_units)

    @property
    def node_hours(self) -> float | None:
        return None if self.minutes is None else node_hours(60 * self.minutes, self.layout.num_nodes)

    @property
    def measured_minutes(self) -> float | None:
        """Of the set that was measured, where it trained this recipe to this target."""
        measured, recipe = self.measured, self.layout.recipe
        is_same = measured and (has_same_recipe(measured.recipe, recipe)
                                and measured.recipe.target_accuracy == recipe.target_accuracy)
        return measured.minutes if measured and is_same else None

    @property
    def measured_step_s(self) -> float | None:
        return self.measured.step_s if self.measured else None

    @property
    def error(self) -> float | None:
        """Of the minutes."""
        return off_by(self.minutes, self.measured_minutes)

    @property
    def step_error(self) -> float | None:
        return off_by(self.step_s, self.measured_step_s)


def off_by(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted over measured, minus 1; None without one of them."""
    return predicted / measured - 1 if predicted and measured else None
