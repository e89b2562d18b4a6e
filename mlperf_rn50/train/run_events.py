"""Events of a run and their sinks. Epochs count from 0, `step` counts completed steps, time_s is on
the run's clock.

Outline of a run, with the events of each line in order. Warned and Noted may occur on any line.

    open the run and its sinks               run.py
    build network and data, warm up          build.py  Opened, LossScaleChanged, Built (new runs)
    measure the device                                 NetworkMeasured
    report the reference runs                          ReferenceFound, InitStopped (new runs)
    start the clock                                    RunStarted or Resumed, PartEnded
    for each epoch:                          loop.py   EpochStarted
        for each step:                                 LossScaleChanged, StepDone, StepsTraced
            save if due, end if asked to stop          Saving, PartEnded
        end the epoch                                  EpochDone, RecordsRead
        evaluate if due                                ClockStepped, EvalStarted, Evaluated,
            end at the target or if behind             Compared, RanksTimed, PartEnded
        save if due, end if asked to stop              Saving, PartEnded
    end the run                                        StepsTraced, ClockStepped, Ended
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from mlperf_rn50.mllog.elapsed import ElapsedParts
from mlperf_rn50.runfolder import records
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.train.checkpoint.changes import Change
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.plan import Plan


class Event(Struct, frozen=True):
    """Base of all events."""


class Recorded(Event, frozen=True):
    """Base of the events that are a line of metrics.jsonl as they are."""

    record: Struct | None


class Opened(Event, frozen=True):
    """Start of a new run; hosts: the name and the number of ranks of each host."""

    plan: Plan
    seed: int
    hosts: Sequence[tuple[str, int]]
    is_cache_clear: bool
    cache_reason: str


class Built(Event, frozen=True):
    """The network has been built; initial_weights: source of its weights, '' for random ones."""

    plan: Plan
    seed: int
    tensor_names: Sequence[str]
    num_parameters: int
    flops_per_image: int
    initial_weights: str = ''
    notes: Sequence[str] = ()


class NetworkMeasured(Recorded, frozen=True):
    record: records.NetworkRecord


class ReferenceFound(Recorded, frozen=True):
    record: records.ReferenceRecord


class InitStopped(Event, frozen=True):
    """Everything is ready for the run, but no data has been read yet."""


class RunStarted(Event, frozen=True):
    plan: Plan
    num_hosts: int


class Resumed(Event, frozen=True):
    """The clock of a resumed run continues.

    clock_s: training that the checkpoint covers. elapsed_s: time since run_start. stopped_s: this
    time at the last sign of life before. after_fault: whether a fault ended the attempt before.
    parts: of elapsed_s. before: state in the checkpoint. hosts: as in Opened. changes:
    configuration changes since the checkpoint. time_s: since 1970 by the clock of the run, which
    cannot be set; on rank 0.
    """

    plan: Plan
    hosts: Sequence[tuple[str, int]]
    step: int
    clock_s: float
    elapsed_s: float
    stopped_s: float
    after_fault: bool
    parts: ElapsedParts | None
    checkpoint: str
    before: Progress
    changes: Sequence[Change] = ()
    time_s: float | None = None


class EpochStarted(Event, frozen=True):
    """Start of an epoch; block_epochs: length of the block that starts here (Plan.block_epochs), if
    any."""

    epoch: int
    num_steps: int
    first_step: int
    block_epochs: int | None


class StepDone(Recorded, frozen=True):
    """End of a step; learning_rate: the one applied. record: of the steps of its epoch since the
    one before or a resume, or None for a step whose record is not due."""

    record: records.TrainRecord | None
    step: int
    loss: float
    learning_rate: float
    images_per_s: float
    gradient_norm: float | None = None
    trust_ratios: Mapping[str, float] = {}


class LossScaleChanged(Recorded, frozen=True):
    """Change of the float16 loss scale after a step. The first step is 1; 0 stands for the steps
    before run_start."""

    record: records.LossScaleRecord


class StepsTraced(Event, frozen=True):
    spans: Sequence[StepSpans]


class EpochDone(Event, frozen=True):
    epoch: int
    time_s: float
    images_per_s: float
    learning_rate: float


class RecordsRead(Recorded, frozen=True):
    record: records.EpochRecord


class EvalStarted(Event, frozen=True):
    epoch: int


class Evaluated(Event, frozen=True):
    """End of the evaluation after an epoch; first_epoch: first epoch of the block that ends
    here."""

    epoch: int
    first_epoch: int
    time_s: float
    accuracy: Accuracy


class Compared(Recorded, frozen=True):
    record: records.CourseRecord


class RanksTimed(Recorded, frozen=True):
    record: records.RanksRecord


class ClockStepped(Recorded, frozen=True):
    """The wall clock of a host jumped against its monotonic clock."""

    record: records.ClockStepRecord


class PartEnded(Recorded, frozen=True):
    record: records.PartRecord


class Saving(Event, frozen=True):
    """A checkpoint is being taken."""


class Noted(Event, frozen=True):
    text: str


class Warned(Noted, frozen=True):
    """Like Noted, but about something that needs attention."""


class Ended(Event, frozen=True):
    """End of the run; status: converged, aborted, interrupted or failed. checkpoint_s: since the
    last evaluation; reason: of a failure."""

    status: str
    best_top1: float
    epochs_to_converge: int | None = None
    time_s: float = 0.0
    images_per_s: float = 0.0
    checkpoint_s: float = 0.0
    # of time_s; None for a run without a resume, and on ranks other than 0
    parts: ElapsedParts | None = None
    reason: str = ''

    @property
    def best_text(self) -> str:
        return f'{100 * self.best_top1:.2f} %' if self.best_top1 else 'no evaluation above 0 % yet'


def failed(best_top1: float, error: Exception) -> Ended:
    """Return the end of a run that an error ends."""
    return Ended('failed', best_top1, reason=str(error))


class Sink(Protocol):
    """Recorder or display of events; it does not influence the run."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...
