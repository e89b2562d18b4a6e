"""History of a run, accumulated from the records of metrics.jsonl."""
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from mlperf_rn50.analysis.watch.run_state import BandPoint, LiveEvaluation, RankTime
from mlperf_rn50.mllog.sidecar.metrics import Count, Epoch, EvalRecord, Number, Whole
from mlperf_rn50.text import printable

_MAX_POINTS, _MAX_RANKS, MAX_TEXT, MAX_ITEMS = 20_000, 4096, 400, 20  # limits for untrusted files
_PACE_EPOCHS = 4.0  # epoch_s is averaged over this many of the latest epochs
Epochs = Annotated[float, msgspec.Meta(ge=0, le=10**6)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class TrainRecord(msgspec.Struct, tag_field='event', tag='train'):
    step: Whole | None = None
    epoch: Epochs = 0.0
    time_s: Number | None = None
    loss: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] | None = None
    learning_rate: Number | None = None
    images_per_s: Number | None = None


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
    # Each item: (epoch, fraction of the schedule, mean, low, high, number of runs)
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


def text(value: str) -> str:
    """Return untrusted text as one printable line, cut after MAX_TEXT characters."""
    return printable(' '.join(value[:MAX_TEXT].split()))


@dataclass
class MetricsHistory:
    last: TrainRecord = field(default_factory=TrainRecord)
    points: list[tuple[float, float]] = field(default_factory=list)  # (epoch, time_s)
    speeds: list[tuple[float, float]] = field(default_factory=list)  # (time_s, images_per_s)
    evaluations: dict[int, LiveEvaluation] = field(default_factory=dict)
    ranks: tuple[RankTime, ...] = ()
    stragglers: tuple[str, ...] = ()
    reference: ReferenceRecord = field(default_factory=ReferenceRecord)
    band: dict[int, BandPoint] = field(default_factory=dict)
    verdicts: dict[int, CourseRecord] = field(default_factory=dict)
    layout: ResumedRecord | None = None
    num_resumes: int = 0

    def add(self, record: METRICS) -> None:
        match record:
            case TrainRecord():
                self.last = record
                self._add_point(record.epoch, record.time_s, record.images_per_s)
            case EvalRecord() if record.num_top1 <= record.num_images and len(self.evaluations) < _MAX_POINTS:
                self.evaluations[record.epoch] = LiveEvaluation(record.epoch, record.num_top1 / record.num_images,
                                                            record.time_s)
                self._add_point(record.epoch, record.time_s)
            case RanksRecord():
                self.ranks = tuple(RankTime(r.rank, text(r.host), *(s / r.num_steps for s in (
                    r.data_s, r.compute_s, r.wait_s))) for r in record.ranks[:_MAX_RANKS])
                self.stragglers = tuple(filter(None, map(text, record.stragglers[:MAX_ITEMS])))
            case ResumedRecord():
                self._resume(record)
            case ReferenceRecord():
                self.reference = record
                self.band = {epoch: BandPoint(epoch, mean, low, high) for epoch, _, mean, low, high, _ in record.band}
            case CourseRecord() if len(self.verdicts) < _MAX_POINTS:
                self.verdicts[record.epoch] = record
                if record.epoch not in self.band and record.mean is not None:
                    self.band[record.epoch] = BandPoint(record.epoch, record.mean, record.low, record.high)

    def _add_point(self, epoch: float, time_s: float | None, images_per_s: float | None = None) -> None:
        if time_s is None:
            return
        self.points = [p for p in self.points[-_MAX_POINTS:] if p[0] >= epoch - _PACE_EPOCHS] + [(epoch, time_s)]
        if images_per_s is not None:
            self.speeds.append((time_s, images_per_s))
            if len(self.speeds) > _MAX_POINTS:
                del self.speeds[1::2]

    def _resume(self, record: ResumedRecord) -> None:
        """Drop all records after the checkpoint, because the resumed run trains these steps again."""
        self.num_resumes += 1
        self.layout = record
        if self.last.step and self.last.epoch:
            epoch = record.step * self.last.epoch / self.last.step
            self.evaluations = {e: v for e, v in self.evaluations.items() if e <= epoch + 1e-6}
            self.verdicts = {e: v for e, v in self.verdicts.items() if e <= epoch + 1e-6}
            self.last = TrainRecord(record.step, epoch)
        self.points, self.ranks, self.stragglers = [], (), ()

    @property
    def epoch_s(self) -> float | None:
        """Seconds per epoch, including its evaluation, averaged over recent epochs."""
        if not self.points:
            return None
        (first, since_s), (last, now_s) = self.points[0], self.points[-1]
        return (now_s - since_s) / (last - first) if last > first and now_s >= since_s else None
