"""Data classes of predictions: measured base, interconnect, epochs, costs of several nodes, layout,
predicted times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mlperf_rn50.analysis.sets.run_set import RunSet, node_hours
from mlperf_rn50.analysis.sets.settings import Recipe

Number = float | None  # None if unknown
# A prediction on several nodes starts from a one-node set of another machine (other) or of the same
# machine (own), or from the latter and a measured step on several nodes (two). Knowledge increases
# in this order.
Knowledge = Literal['other', 'own', 'two']
KNOWLEDGE: tuple[Knowledge, ...] = ('other', 'own', 'two')
KNOWLEDGE_TEXTS: dict[Knowledge, str] = {
    'own': 'own set',
    'two': 'own set and a second set',
    'other': 'other set',
}


@dataclass(frozen=True)
class Epochs:
    """Mean, fewest and most epochs to the target, and their source."""

    mean: float
    low: float
    high: float
    source: str
    # where the recipe is from
    kind: Literal['source', 'published', 'interpolated', 'given'] = 'source'


@dataclass(frozen=True)
class Layout:
    """Nodes, accelerators or ranks per node, a recipe, and its epochs to the target if they are
    known."""

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
class Base:
    """A measured step that predictions start from."""

    name: str
    source: str
    num_nodes: int
    num_units: int  # all accelerators or, on nodes without accelerators, all ranks
    has_accelerators: bool
    global_batch_size: int
    step_s: float
    evaluation_s: float | None  # None if not measured
    outside_s: float  # extra time of the first epoch, and gaps
    train_samples: int
    dataset: str | None  # None for ImageNet
    run_set: RunSet | None = None  # None for a bench
    generation: str = ''  # of the accelerators
    # seconds on these nodes by other local batches
    steps: Mapping[float, float] = field(default_factory=dict)
    # whether the step was measured on other accelerators or with other images
    is_scaled: bool = False
    noise: float = 0.0  # relative change of the step by the first epoch, if that was the shortest

    @property
    def full_name(self) -> str:
        return f'{self.name} ({self.source})'

    @property
    def unit(self) -> str:
        return 'accelerator' if self.has_accelerators else 'rank'

    @property
    def local_batch_size(self) -> float:
        return self.global_batch_size / self.num_units

    @property
    def layout(self) -> Layout:
        recipe = self.run_set.recipe if self.run_set else Recipe(None, self.global_batch_size)
        return Layout(self.num_nodes, self.num_units // self.num_nodes, recipe)


@dataclass(frozen=True)
class Link:
    """The ports of a node and the exchange of a step's gradients through them."""

    gbit_s: float | None  # all ports of a node together, per direction; None if unknown
    exchange_bytes: int
    source: str
    # share of the exchange that the backward pass hid, if extra_s was measured
    overlap: float = 0.0
    # measured time of a step besides exchange and computing; None to use the model's
    extra_s: float | None = None
    is_tcp: bool = False  # without RDMA, each member of the ring adds latency
    is_hierarchical: bool = False  # reduction within each node, then a ring of nodes
    # whose gradients are exchanged, or the file that states them; '' for ResNet-50 on ImageNet
    network: str = ''


# ResNet-50 has 25.56 million gradients; published sets exchange them in 2 bytes each
FLOAT16_BYTES = 51_000_000


@dataclass(frozen=True)
class Costs:
    """Time on several nodes besides computing and exchange, fitted to published sets, and the
    errors of the model."""

    # of a step, by generation of the accelerator
    latency_s: Mapping[str, float] = field(default_factory=dict)
    other_latency_s: float = 0.0  # of a step with any other accelerator
    early_s: float = 0.0  # added to a step of the rounds before v1.0
    # nodes, and extra time of the first epoch and gaps, of published sets
    starts: tuple[tuple[int, float], ...] = ()
    # half of the 80 % interval, natural logarithm
    errors: Mapping[Knowledge, float] = field(default_factory=dict)
    most_nodes: int = 0  # largest number of nodes of a set
    least_local: float = 0.0  # smallest number of images per accelerator of a set on several nodes
    source: str = 'assumed for ranks without accelerators'


class StepParts(NamedTuple):
    """Seconds of a step: its parts, and how much of the exchange the backward pass hides."""

    compute_s: float
    exchange_s: float
    hidden_s: float
    other_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exchange_s - self.hidden_s + self.other_s


@dataclass(frozen=True)
class Prediction:
    """Predicted values of a layout, None after a refusal; minutes also if epochs or evaluations are
    unknown."""

    layout: Layout
    refusal: str | None = None
    compute_s: Number = None
    exchange_s: Number = None
    hidden_s: Number = None
    other_s: Number = None  # besides computing and exchange
    step_s: Number = None
    images_per_s: Number = None
    # images/s per accelerator or rank, relative to the base
    hardware_efficiency: Number = None
    minutes: Number = None
    interval: tuple[float, float] | None = None  # minutes at both ends of the 80 % interval
    node_hours: Number = None
    cost: Number = None
    speedup: Number = None  # minutes of the base's layout / minutes of this layout
    efficiency: Number = None  # speedup / ratio of accelerators or ranks
    knowledge: Knowledge | None = None  # None for the base's layout, and from one node to one node
    # share of the step from measurements, not from fitted costs
    measured_share: Number = None
    # of a set with this layout and batch, but perhaps another recipe
    measured_step_s: Number = None
    # of this set, if recipe and target are those of the layout
    measured_minutes: Number = None
    # of the fastest set with this layout and target, at any batch
    best_measured_minutes: Number = None
    best_measured_batch_size: int | None = None
    best_measured_system: str | None = None
    unchanged_step_s: Number = None  # without the changes of --what-if
    unchanged_minutes: Number = None
    doubts: Sequence[str] = ()

    @property
    def known_minutes(self) -> float | None:
        """Least measured time of the layout or, if it was not measured, the predicted time."""
        return self.best_measured_minutes or self.minutes

    @property
    def known_node_hours(self) -> float:
        return node_hours(60 * (self.known_minutes or 0.0), self.layout.num_nodes)


def relative_error(predicted: Number, measured: Number) -> Number:
    """Return predicted / measured - 1, or None if either is unknown."""
    return predicted / measured - 1 if predicted and measured else None
