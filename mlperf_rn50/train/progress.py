"""How far a run is: what a checkpoint holds beside the arrays."""
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """The one mutable record of a run, the same on every rank.

    Args:
        step: optimizer steps taken.
        seed: of the run.
        world_size: number of ranks.
        best_top1: best Top-1 so far, a fraction.
        clock_s: seconds on the run's clock so far.
        global_batch_size: images per step.
        lr_batch_size: images per step that the configured learning rate is for.
        num_train: images per epoch.
        result_index: number of the result file the run writes.
        nodes: node of every rank, counted from 0.
        num_resumes: how often the run was resumed.
        last_lr: learning rate of the last step, 0 before the first.
        loss_scale: of the next step, see LossScale.
        num_finite_steps: see LossScale.
        images: that training took part in, since the start or the last resume.
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
        numbers = value if isinstance(value, list) and name == 'nodes' else [value]
        wanted = (int, float) if kinds[name] is float else (int,)
        if any(not isinstance(n, wanted) or isinstance(n, bool) or n < 0 for n in numbers):
            raise ValueError(f'{name}: got {value!r}, expected a number')
    return Progress(**tree)
