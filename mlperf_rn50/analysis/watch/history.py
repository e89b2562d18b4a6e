"""History of a run, accumulated from the records of metrics.jsonl."""

from collections import deque
from dataclasses import dataclass, field

from mlperf_rn50.analysis.watch.run_state import BandPoint, LiveEvaluation, RankTime
from mlperf_rn50.mllog.goodput import MAX_RECORDS
from mlperf_rn50.runfolder import records
from mlperf_rn50.text import printable

_MAX_POINTS, _MAX_RANKS, MAX_TEXT, MAX_ITEMS = 20_000, 4096, 400, 20  # limits for untrusted files
_PACE_EPOCHS = 4.0  # epoch_s is averaged over this many of the latest epochs


def text(value: str) -> str:
    """Return untrusted text as one printable line, cut after MAX_TEXT characters."""
    return printable(' '.join(value[:MAX_TEXT].split()))


@dataclass
class MetricsHistory:
    last: records.TrainRecord = records.TrainRecord()
    points: deque[tuple[float, float]] = field(  # (epoch, time_s)
        default_factory=lambda: deque(maxlen=_MAX_POINTS)
    )
    speeds: list[tuple[float, float]] = field(default_factory=list)  # (time_s, images_per_s)
    evaluations: dict[int, LiveEvaluation] = field(default_factory=dict)
    ranks: tuple[RankTime, ...] = ()
    stragglers: tuple[str, ...] = ()
    limit: str = ''  # what limits the run
    reference: records.ReferenceRecord = records.ReferenceRecord()
    band: dict[int, BandPoint] = field(default_factory=dict)
    standings: dict[int, records.CourseRecord] = field(default_factory=dict)
    resumes: list[records.ResumedRecord] = field(default_factory=list)
    parts: list[records.PartRecord] = field(default_factory=list)

    def add(self, record: records.MetricsRecord) -> None:
        match record:
            case records.TrainRecord():
                self.last = record
                self._add_point(record.epoch, record.time_s, record.images_per_s)
            case records.EvalRecord() if (
                record.num_top1 <= record.num_images and len(self.evaluations) < _MAX_POINTS
            ):
                self.evaluations[record.epoch] = LiveEvaluation(
                    record.epoch, record.num_top1 / record.num_images, record.time_s
                )
                self._add_point(record.epoch, record.time_s)
            case records.RanksRecord():
                self.ranks = tuple(
                    RankTime(
                        rank=r.rank,
                        host=text(r.host),
                        data_s=(r.data_s + r.python_s) / r.num_steps,
                        compute_s=(r.compute_s + r.update_s) / r.num_steps,
                        wait_s=r.wait_s / r.num_steps,
                    )
                    for r in record.ranks[:_MAX_RANKS]
                )
                self.stragglers = tuple(filter(None, map(text, record.stragglers[:MAX_ITEMS])))
            case records.ResumedRecord():
                self._resume(record)
            case records.PartRecord() if len(self.parts) < MAX_RECORDS:
                self.parts.append(record)
            case records.ReferenceRecord():
                self.reference = record
                self.band = {
                    b.epoch: BandPoint(b.epoch, b.mean, b.low, b.high) for b in record.band
                }
            case records.CourseRecord() if len(self.standings) < _MAX_POINTS:
                self.standings[record.epoch] = record
                if record.epoch not in self.band and record.mean is not None:
                    self.band[record.epoch] = BandPoint(
                        record.epoch, record.mean, record.low, record.high
                    )

    def _add_point(
        self, epoch: float, time_s: float | None, images_per_s: float | None = None
    ) -> None:
        if time_s is None:
            return
        while self.points and self.points[0][0] < epoch - _PACE_EPOCHS:
            self.points.popleft()
        self.points.append((epoch, time_s))
        if images_per_s is not None:
            self.speeds.append((time_s, images_per_s))
            if len(self.speeds) > _MAX_POINTS:
                del self.speeds[1::2]

    def _resume(self, record: records.ResumedRecord) -> None:
        """Drop all records after the checkpoint, because the resumed run trains these steps
        again."""
        self.resumes.append(record)
        epoch = record.epoch
        if epoch is None and self.last.step and self.last.epoch:
            epoch = record.step * self.last.epoch / self.last.step
        if epoch is not None:
            self.evaluations = {e: v for e, v in self.evaluations.items() if e <= epoch + 1e-6}
            self.standings = {e: v for e, v in self.standings.items() if e <= epoch + 1e-6}
            self.last = records.TrainRecord(record.step, epoch, record.time_s)
        self.points.clear()
        self.ranks, self.stragglers = (), ()

    @property
    def epoch_s(self) -> float | None:
        """Seconds per epoch, including its evaluation, averaged over recent epochs."""
        if not self.points:
            return None
        (first, since_s), (last, now_s) = self.points[0], self.points[-1]
        return (now_s - since_s) / (last - first) if last > first and now_s >= since_s else None
