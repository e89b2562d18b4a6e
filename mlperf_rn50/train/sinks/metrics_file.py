"""Machine-readable files of a run: metrics.jsonl, config.yaml and env.json."""

from dataclasses import asdict

from msgspec import Struct

from mlperf_rn50.config import render_yaml
from mlperf_rn50.files import LineFile, write_atomically, writing
from mlperf_rn50.mllog.elapsed import render_parts
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import EndRecord, EvalRecord, ResumedRecord
from mlperf_rn50.system.environment import dump_environment
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.sinks.mlperf_log import resumed_facts


class Metrics:
    def __init__(self, run: RunFolder, dataset: str):
        self._run, self._dataset = run, dataset
        self._file = LineFile(run.metrics)

    def handle(self, event: events.Event) -> None:
        record: Struct | None = None
        match event:
            case events.Opened():
                with writing(self._run.config):
                    write_atomically(self._run.config, render_yaml(event.plan.config))
                with writing(self._run.env):
                    dump_environment(self._run.env, list(event.hosts))
            case events.Resumed():
                record = ResumedRecord(
                    step=event.step,
                    time_s=event.elapsed_s,
                    epoch=event.step / event.plan.steps_per_epoch,
                    hosts=dict(event.hosts),
                    **resumed_facts(event),
                )
            case events.Evaluated():
                record = EvalRecord(
                    epoch=event.epoch + 1,
                    time_s=event.time_s,
                    dataset=self._dataset,
                    **asdict(event.accuracy),
                )
            case events.Ended(status='failed'):
                record = EndRecord('failed', epochs_to_converge=None)
            case events.Ended():
                record = EndRecord(
                    status=event.status,
                    epochs_to_converge=event.epochs_to_converge,
                    time_to_train_s=event.time_s,
                    best_top1=event.best_top1,
                    images_per_s=event.images_per_s,
                    checkpoint_s=event.checkpoint_s,
                    elapsed_parts=render_parts(event.parts),
                )
            case events.Recorded():
                record = event.record
        if record:
            self._file.write(encode(record))

    def close(self) -> None:
        self._file.close()
