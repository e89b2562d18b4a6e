"""Records of a run folder, with one type per kind of line for its writer and for all of its
readers.

The files are not trusted. A reader skips a line whose values do not have these types and ranges,
and ignores unknown keys. Keys with a default may be missing, because earlier versions did not write
them. Epochs count from 1, accuracies are fractions, and time_s is the time since run_start, unless
a record states another origin.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from mlperf_rn50.runfolder.jsonl import append, read_lines

Number = Annotated[float, Meta(ge=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Percent = Annotated[float, Meta(ge=0, le=100)]
Epoch = Annotated[int, Meta(ge=1, le=10**6)]
Epochs = Annotated[float, Meta(ge=0, le=10**6)]
Whole = Annotated[int, Meta(ge=0, le=10**12)]
Count = Annotated[int, Meta(ge=1, le=10**12)]
Bytes = dict[str, Annotated[int, Meta(ge=0, le=10**18)]]  # by host
Gauge = Annotated[float, Meta(ge=0, le=1e18)]
Name = Annotated[str, Meta(max_length=64)]
Rates = dict[str, Annotated[float, Meta(ge=0, le=1e15)]]  # by device
MAX_KEPT = 10_000  # newest attempts or failures of a folder
T = TypeVar('T')


class TrainRecord(Struct, tag_field='event', tag='train'):
    step: Whole | None = None
    epoch: Epochs = 0.0
    time_s: Number | None = None
    loss: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    learning_rate: Number | None = None  # the one applied
    images_per_s: Number | None = None
    scheduled_learning_rate: Number | None = None  # larger only in a partly filled last step


class LossScaleRecord(Struct, tag_field='event', tag='loss_scale'):
    step: Whole
    before: float
    now: float


class EvalRecord(Struct, tag_field='event', tag='eval', kw_only=True):
    epoch: Epoch
    time_s: Number | None = None
    num_top1: Whole
    num_top5: Whole = 0
    num_images: Count
    dataset: str = ''


class EpochRecord(Struct, tag_field='event', tag='epoch'):
    """Bytes of training records that each host read in an epoch; new bytes are read for the first
    time."""

    epoch: Epoch
    record_bytes: Bytes
    new_record_bytes: Bytes = {}


class RankSteps(Struct, kw_only=True):
    """Sums of a rank in seconds over its steps since the last evaluation; the phases add up to the
    time of these."""

    rank: Annotated[int, Meta(ge=0, le=10**6)]
    host: str
    cores: str = ''
    num_steps: Count
    data_s: Number  # phase: waiting for images
    read_s: Number = 0.0  # part of data_s in which the record files were not ready
    decode_s: Number = 0.0  # part of data_s in which DALI was not ready
    # phase: the device waits for the training loop, which has not yet asked for images
    python_s: Number = 0.0
    compute_s: Number  # phase: forward and backward pass
    wait_s: Number  # phase: from the end of the backward pass to the end of the exchange
    # part of wait_s in which a slower rank still computed, so the rest moves bytes
    slow_rank_s: Number = 0.0
    update_s: Number = 0.0  # phase: from the end of the exchange to the end of the update
    hidden_s: Number = 0.0  # exchange during the backward pass, which is part of compute_s
    # median, 99th percentile and maximum of a step
    spread_s: dict[Name, tuple[Number, Number, Number]] = {}
    # sums over the steps in which the other ranks waited for this one
    critical_s: dict[Name, Number] = {}
    # Since the last evaluation, with the one that ends. Zero or empty: not measured.
    wall_s: Number = 0.0
    cpu_s: Number = 0.0  # of all threads of the rank
    throttled_s: Number = 0.0  # by a CPU quota, summed over the CPUs
    num_cores: Whole = 0
    num_threads: Whole | None = None  # OMP_NUM_THREADS
    num_sharing: Whole = 1  # ranks of the run that may use one of its cores, itself included
    others_s: Number | None = None  # CPU time of other programs on its cores
    steal_s: Number = 0.0  # time that the host of a virtual machine took from these cores
    # By kind of thread (compute, exchange, input): of the one that waited most, time on a core and
    # ready without one
    ready_s: dict[Name, tuple[Number, Number]] = {}
    stopped_s: Number = 0.0  # by SIGSTOP
    load: Number | None = None  # 1-minute load average


class RanksRecord(Struct, tag_field='event', tag='ranks'):
    """Times since the last evaluation, this one included."""

    epoch: Whole = 0
    time_s: Number = 0.0
    ranks: list[RankSteps] = []
    stragglers: list[Annotated[str, Meta(max_length=4000)]] = []
    eval_s: Number = 0.0  # evaluation, as seen by the training loop of rank 0
    checkpoint_s: Number = 0.0  # training waited for checkpoints
    # exchange of a single number among all ranks; None for one rank
    latency_s: Number | None = None
    # By phase, numbers of steps of all ranks since the start of the process. Bin k counts steps of
    # 1e-5 * 2**(k / 4) to 1e-5 * 2**((k + 1) / 4) seconds, the first and last bin also those
    # beyond.
    histograms: dict[Name, list[Whole]] = {}


class NetworkRecord(Struct, tag_field='event', tag='network'):
    """Facts about the steps of a run; written before its clock starts or continues."""

    local_batch_size: Count  # images of a rank and step
    flops_per_image: Gauge  # of the forward pass; with data.sizes, the mean over the planned epochs
    gradient_bytes: Whole  # exchanged by each rank in a step
    num_buckets: Count
    # of a rank in large matrix products, while all ranks compute
    peak_flops_per_s: Gauge | None = None
    job: Annotated[str, Meta(max_length=200)] = ''  # as in Failure


class StepSpans(Struct):
    """Line of a trace: a step of a rank. Times are in seconds on the host's monotonic clock, in
    this order."""

    step: Whole  # counted from 1
    start_s: Number  # end of the step before, or of the evaluation or checkpoint before
    asked_s: Number  # the training loop asks for images
    arrived_s: Number  # the images are there
    computed_s: Number  # end of the backward pass
    exchanged_s: Number  # end of the exchange
    updated_s: Number  # end of the update, and start of the next step
    # when each was computed on this rank, and when its exchange ended
    buckets: list[tuple[Number, Number]] = []
    attempt_s: Gauge = 0.0  # start of the attempt, equal on all ranks, in seconds since 1970


class ResumedRecord(Struct, tag_field='event', tag='resumed', omit_defaults=True):
    step: Whole
    number_of_ranks: Count | None = None
    number_of_nodes: Count | None = None
    global_batch_size: Count | None = None
    lr_scale: Number | None = None
    hosts: dict[str, Count] = {}  # ranks on each host; env.json has those of the first start
    time_s: Number | None = None
    epoch: Epochs | None = None  # trained so far
    # of time_s, in seconds: fields of mllog.elapsed.ElapsedParts
    elapsed_parts: dict[Name, Number] = {}
    changed: dict[str, tuple[Any, Any]] = {}  # before and now, of each changed configuration key


class BandRecord(Struct, array_like=True):
    """The reference runs at an epoch; point: fraction of the schedule; low and high: None for too
    few runs."""

    epoch: Epoch
    point: float | None
    mean: Fraction | None
    low: Fraction | None
    high: Fraction | None
    num_runs: Whole


class ReferenceRecord(Struct, tag_field='event', tag='reference'):
    how: str | None = None
    num_reference: Whole = 0
    sources: list[str] = []
    target: Fraction | None = None
    reference_epochs: tuple[Epochs, Epochs] | None = None
    band: list[BandRecord] = []
    text: str = ''


class CourseRecord(Struct, tag_field='event', tag='course'):
    """Comparison of an evaluation with the reference runs; mean, low and high are None if there is
    no band."""

    epoch: Epoch
    point: float | None = None
    accuracy: Fraction | None = None
    mean: Fraction | None = None
    low: Fraction | None = None
    high: Fraction | None = None
    num_reference: Whole = 0
    below: bool = False
    behind: bool = False
    reference_epochs: tuple[Epochs, Epochs] | None = None
    seconds_left: tuple[Gauge, Gauge] | None = None
    text: str = ''


class ClockStepRecord(Struct, tag_field='event', tag='clock_step'):
    host: str
    step_s: float


class PartRecord(Struct, tag_field='event', tag='part'):
    """Part of the elapsed time that is not training; mllog/goodput.py has their meaning.

    name: start_up, reading, evaluation, checkpoint or stall. time_s: its end.
    """

    name: Name
    time_s: Number
    seconds: Number


class EndRecord(Struct, tag_field='event', tag='end', omit_defaults=True):
    """End of the run; only the status of a failed run is known. checkpoint_s: as in RanksRecord."""

    status: str
    epochs_to_converge: Epoch | None | UnsetType = UNSET
    time_to_train_s: Number | None = None
    best_top1: Fraction | None = None
    images_per_s: Number | None = None
    checkpoint_s: Number = 0.0
    # of time_to_train_s, for a resumed run, as in ResumedRecord
    elapsed_parts: dict[Name, Number] = {}


# Any line of metrics.jsonl
MetricsRecord: TypeAlias = (
    TrainRecord
    | LossScaleRecord
    | EvalRecord
    | EpochRecord
    | RanksRecord
    | NetworkRecord
    | ResumedRecord
    | ReferenceRecord
    | CourseRecord
    | ClockStepRecord
    | PartRecord
    | EndRecord
)


def read_records(path: Path, kind: type[T], must_end: bool = False) -> Iterator[tuple[int, T]]:
    """Yield (line number, record) of the records of a kind, or of a union of kinds, in a
    metrics.jsonl; must_end: as in read_lines."""
    config = getattr(kind, '__struct_config__', None)  # a union has none
    mark = f'"{config.tag}"'.encode() if config else b''
    return read_lines(path, kind, mark, must_end)


def read_all_records(path: Path) -> Iterator[MetricsRecord]:
    """Yield the records of a metrics.jsonl in their order."""
    lines: Iterator[tuple[int, MetricsRecord]]
    lines = read_lines(path, MetricsRecord)  # type: ignore[arg-type]
    return (record for _, record in lines)


@dataclass(frozen=True)
class Attempt:
    """Line of attempts.jsonl: the result of an attempt, which is one start of the ranks."""

    run: int | None  # number of the run; None if no run began
    exit_code: Annotated[int, Meta(ge=-255, le=255)]
    # a status of errors.EXIT_CODES; None if metrics.jsonl has no EndRecord of the attempt
    end: str | None
    gained: bool  # whether the attempt wrote a newer checkpoint
    can_resume: bool
    has_stepped: bool = False  # whether the attempt recorded a step
    place: str = 'before a run began'  # or the last recorded step and phase
    cause: str = ''  # of the end
    origin: str = ''  # of the cause: outside or program; '' if unknown
    # number of the Slurm job or token of the launcher, the same for all starts of a requeued Slurm
    # job; not the job of a Failure
    job: str = ''


@dataclass(frozen=True)
class BatchStart:
    """Line of attempts.jsonl: a start of a launcher in a Slurm job, unless it was requeued."""

    job: str
    first_run: int  # number of its first run; 0 if it resumes a run of the folder
    num_resumes: int = 0  # earlier resumes of the run that it resumes


@dataclass(frozen=True)
class Failure:
    """Line of failures.jsonl, also written by launch/guard.sh: the failure of a rank or a host."""

    job: str  # MLPERF_RN50_JOB, which identifies a start of all ranks
    host: str
    cause: str
    rank: int | None = None  # None for a failure of the host
    # whether the cause is outside the program, such as a lost host or a kill
    is_outside: bool = False
    time_s: float = 0.0  # since 1970; 0 in records of earlier versions
    # since the rank's last sign of life; None for a host and in records of earlier versions
    silent_s: Number | None = None
    # the rank for which this one waited, -1 if it is not known which; None if it waited for none
    late_rank: int | None = None


RECORDS = 'attempts.jsonl', 'failures.jsonl'  # of the launchers of a folder


def note_attempt(folder: Path, batch_job: str, attempt: Attempt) -> None:
    """Record an attempt for later launchers; write nothing if there is no run folder."""
    append(folder / 'attempts.jsonl', replace(attempt, job=batch_job))


def read_attempts(folder: Path, batch_job: str | None = None) -> list[Attempt]:
    """Return the attempts of a batch_job since its newest BatchStart; all attempts for None."""
    path = folder / 'attempts.jsonl'
    starts = [n for n, start in read_lines(path, BatchStart) if start.job == batch_job]
    first = max(starts, default=0)
    lines = read_lines(path, Attempt)
    found = (a for n, a in lines if n > first and batch_job in (None, a.job))
    return list(deque(found, MAX_KEPT))


def note_batch_start(folder: Path, start: BatchStart) -> None:
    append(folder / 'attempts.jsonl', start)


def read_batch_start(folder: Path, batch_job: str) -> BatchStart | None:
    """Return the newest start of a batch_job in a folder; None if none is recorded. Raise OSError
    if storage fails."""
    lines = read_lines(folder / 'attempts.jsonl', BatchStart, must_end=True)
    starts = deque((start for _, start in lines if start.job == batch_job), 1)
    return starts[0] if starts else None


def count_resumes(metrics: Path) -> int:
    return sum(1 for _ in read_records(metrics, ResumedRecord))


def note_failure(folder: Path, failure: Failure) -> None:
    """Record a failure at the present time. A launcher counts failures to choose hosts for a
    restart."""
    append(folder / 'failures.jsonl', replace(failure, time_s=time.time()))


def read_failures(folder: Path) -> list[Failure]:
    lines = read_lines(folder / 'failures.jsonl', Failure)
    return list(deque((failure for _, failure in lines), MAX_KEPT))


class GpuSample(Struct, omit_defaults=True):
    utilization_percent: Percent | None = None
    memory_used_bytes: Gauge | None = None
    power_w: Annotated[float, Meta(ge=0, le=1e5)] | None = None
    sm_clock_mhz: Number | None = None


class TelemetryRecord(Struct, omit_defaults=True):
    """Line of telemetry: a sample of a node or, with an event (start, run_start, meter, stop), a
    fact about it."""

    time_ms: Annotated[float, Meta(ge=0, le=1e15)]  # on the node's clock, since 1970
    event: str | None = None
    host: str | None = None
    cpu_cores: Count | None = None
    memory_bytes: Gauge | None = None
    # in the line for run_start or a resume: training that the result is made of so far
    clock_s: Number | None = None
    elapsed_s: Number | None = None  # in the line for a resume: time since run_start
    boot: Name | None = None
    cpu_percent: Percent | None = None
    memory_used_bytes: Gauge | None = None
    page_cache_bytes: Gauge | None = None
    disk_read_bytes_per_s: Rates = {}
    disk_write_bytes_per_s: Rates = {}
    net_receive_bytes_per_s: Rates = {}
    net_send_bytes_per_s: Rates = {}
    infiniband_receive_bytes_per_s: Rates = {}
    infiniband_send_bytes_per_s: Rates = {}
    gpus: list[GpuSample] = []
    # by kind and device
    energy_j: dict[str, dict[Name, Annotated[float, Meta(ge=0, le=1e12)]]] = {}
    gpu_energy: str | None = None  # counted, or integrated from power

    @property
    def time_s(self) -> float:
        return self.time_ms / 1000
