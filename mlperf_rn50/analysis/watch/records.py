"""Typed and bounded records of metrics.jsonl, attempts.jsonl and telemetry, as watch reads them."""
from typing import Annotated, Any

import msgspec

from mlperf_rn50.mllog.sidecar.metrics import Epoch, Number

Epochs = Annotated[float, msgspec.Meta(ge=0, le=10**6)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class TrainRecord(msgspec.Struct, tag_field='event', tag='train'):
    step: Whole | None = None
    epoch: Epochs = 0.0
    time_s: Number | None = None
    loss: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] | None = None
    learning_rate: Number | None = None
    images_per_s: Number | None = None


class EvalRecord(msgspec.Struct, tag_field='event', tag='eval'):
    epoch: Epoch
    num_top1: Whole
    num_images: Count
    time_s: Number | None = None


class RankSteps(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, le=10**6)]
    host: str
    num_steps: Count
    data_s: Number
    compute_s: Number
    wait_s: Number


class RanksRecord(msgspec.Struct, tag_field='event', tag='ranks'):
    ranks: list[RankSteps]
    stragglers: list[str]


class ResumedRecord(msgspec.Struct, tag_field='event', tag='resumed'):
    step: Whole
    number_of_nodes: Count | None = None
    number_of_ranks: Count | None = None
    global_batch_size: Count | None = None


class ReferenceRecord(msgspec.Struct, tag_field='event', tag='reference'):
    text: str = ''
    num_reference: Whole = 0
    reference_epochs: tuple[Epochs, Epochs] | None = None
    # (epoch, point of the schedule, mean, low, high, number of runs)
    band: list[tuple[Epoch, Any, Fraction | None, Fraction | None, Fraction | None, Any]] = []


class CourseRecord(msgspec.Struct, tag_field='event', tag='course'):
    epoch: Epoch
    text: str = ''
    behind: bool = False
    reference_epochs: tuple[Epochs, Epochs] | None = None
    mean: Fraction | None = None
    low: Fraction | None = None
    high: Fraction | None = None


METRICS = TrainRecord | EvalRecord | RanksRecord | ResumedRecord | ReferenceRecord | CourseRecord


class AttemptRecord(msgspec.Struct):
    run: int | None
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)] | None = None
    end: str | None = None
    can_resume: bool = False


class GpuSample(msgspec.Struct):
    utilization_percent: Percent | None = None
    power_w: Annotated[float, msgspec.Meta(ge=0, le=1e5)] | None = None


class NodeSample(msgspec.Struct):
    event: str | None = None
    cpu_percent: Percent | None = None
    gpus: list[GpuSample] = []
