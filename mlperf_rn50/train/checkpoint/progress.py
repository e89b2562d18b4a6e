"""State of a run, stored in a checkpoint: what the run has counted, and what its trainer needs to
continue."""

from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mlperf_rn50.runfolder.records import Fraction, Number

_From0 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_From1 = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Count = Annotated[int, Meta(ge=0, le=10**12)]
_Batch = Annotated[int, Meta(ge=1, le=10**9)]
_Number = Annotated[float, Meta(ge=0, lt=2.0**63)]  # rejects NaN
_Signed = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
_ADDED = ('data_sha256', 'boot', 'start_s')  # keys that older checkpoints lack


@dataclass
class Progress:
    """What a run counts, equal on every rank."""

    step: _Count
    seed: _From0
    world_size: _From1
    best_top1: Fraction
    # training up to the checkpoint that the result is made of, without lost training and pauses
    clock_s: Number
    global_batch_size: _Batch
    lr_batch_size: _Batch  # images per step for which the learning rate is configured
    num_train: _From1
    result_index: _From0
    nodes: list[Annotated[int, Meta(ge=0, lt=2**31)]]  # node number of every rank
    num_resumes: _Count = 0
    images: _From0 = 0  # images and train_s count from the start or the last resume
    train_s: _Number = 0.0
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    # data_digest() of the images; '' for synthetic images and in older checkpoints
    data_sha256: str = ''
    # boot of rank 0's host, '' if unknown; an older checkpoint has neither this nor start_s
    boot: str = ''
    start_s: _Signed = 0.0  # time of run_start since this boot; below 0 for one before the boot

    @property
    def images_per_s(self) -> float:
        """Training throughput of all ranks without evaluations; 0 before the end of the first
        epoch."""
        return self.images / self.train_s if self.train_s else 0.0

    def add_training(self, num_images: int, seconds: float) -> None:
        """Count the images and the time of an epoch, or of its part before a stop."""
        self.images, self.train_s = self.images + num_images, self.train_s + seconds


@dataclass(frozen=True)
class TrainerState:
    """State of a trainer: its arrays by name, only on rank 0, and numbers, which are equal on every
    rank."""

    arrays: dict[str, Any]
    last_lr: _Number = 0.0  # scheduled learning rate of the last step; 0 before the first step
    loss_scale: _Number = 1.0
    num_finite_steps: _From0 = 0


def dump_state(progress: Progress, trainer: TrainerState) -> dict[str, Any]:
    """Return both states without the arrays, as a JSON value."""
    return {
        **asdict(progress),
        **{name: value for name, value in vars(trainer).items() if name != 'arrays'},
    }


def parse_state(tree: Any) -> tuple[Progress, TrainerState]:
    """Return the states in a value of dump_state; raise ValueError for wrong keys, types or
    values."""
    keys = [f.name for f in (*fields(Progress), *fields(TrainerState)) if f.name != 'arrays']
    if not isinstance(tree, dict) or {*tree, *_ADDED} != set(keys):
        raise ValueError(f'the state lacks keys, or has keys other than {", ".join(keys)}')
    progress = msgspec.convert(tree, Progress)
    if len(progress.nodes) != progress.world_size:
        raise ValueError(
            f'nodes: got {len(progress.nodes)}, expected one for each of {progress.world_size} '
            'ranks'
        )
    return progress, msgspec.convert({**tree, 'arrays': {}}, TrainerState)
