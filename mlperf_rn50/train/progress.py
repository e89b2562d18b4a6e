"""How far a run is: what a checkpoint holds beside the arrays."""
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_FROM_1 = ('world_size', 'global_batch_size', 'lr_batch_size', 'num_train')


@dataclass
class Progress:
    """The one mutable record of a run, the same on every rank.

    Args:
        best_top1: best Top-1 so far, a fraction.
        clock_s: seconds on the run's clock so far.
        global_batch_size: images per step.
        lr_batch_size: images per step that the configured learning rate is for.
        num_train: images per epoch.
        nodes: node of every rank, counted from 0.
        last_lr: learning rate of the last step, 0 before the first.
        train_s: seconds of training, since the start or the last resume.
    """

    step: int
    seed: int
    world_size: int
    best_top1: float
    clock_s: float
    global_batch_size: int
    lr_batch_size: int
    num_train: int
    result_index: int
    nodes: list[int]
    num_resumes: int = 0
    last_lr: float = 0.0
    loss_scale: float = 1.0
    num_finite_steps: int = 0
    images: int = 0
    train_s: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def images_per_s(self) -> float:
        """Training throughput over all ranks, evaluations not counted; 0 before the first epoch is over."""
        return self.images / self.train_s if self.train_s else 0.0


def dump_progress(progress: Progress) -> dict[str, Any]:
    """The record as a dict for JSON."""
    return asdict(progress)


def parse_progress(tree: Any) -> Progress:
    """The record from what JSON held.

    Raises:
        ValueError: a key is missing, unknown or of another type.
    """
    kinds = {f.name: f.type for f in fields(Progress)}
    if not isinstance(tree, dict) or set(tree) != set(kinds):
        raise ValueError(f'its state has other keys than {", ".join(kinds)}')
    for name, value in tree.items():
        _check(name, kinds[name], value)
    if len(tree['nodes']) != tree['world_size']:
        raise ValueError(f'nodes: got {len(tree["nodes"])}, expected one for each of {tree["world_size"]} ranks')
    return Progress(**tree)


def _check(name: str, kind: Any, value: Any) -> None:
    """Raise ValueError unless a value is of its field's kind, and a number that a run can have."""
    if kind in (int, float):
        least, types = int(name in _FROM_1), (int, float) if kind is float else (int,)
        if type(value) not in types or not least <= value < 2**63:  # nor NaN
            raise ValueError(f'{name}: got {str(value)[:40]!r}, expected a number from {least}')
    elif name == 'nodes':
        if not isinstance(value, list) or any(type(n) is not int or not 0 <= n < 2**31 for n in value):
            raise ValueError(f'nodes: got {str(value)[:40]}, expected numbers from 0')
    elif not isinstance(value, dict) or not all(isinstance(keys, dict) for keys in value.values()):
        raise ValueError(f'{name}: got {str(value)[:40]}, expected sections with keys')
