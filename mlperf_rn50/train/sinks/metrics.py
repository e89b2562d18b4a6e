"""Machine-readable files of a run: metrics.jsonl, config.yaml and env.json."""

from dataclasses import asdict

from msgspec import Struct

from mlperf_rn50.config import render_yaml
from mlperf_rn50.files import LineFile, write_atomically, writing
from mlperf_rn50.mllog.elapsed import render_parts
from mlperf_rn50.runfolder import records
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.environment import dump_environment
from mlperf_rn50.train import events
from mlperf_rn50.train.sinks.mlperf_log import render_changes, render_ranks


class Metrics:
    def __init__(self, run: RunFolder, dataset: str):
        self._run, self._dataset = run, dataset
        self._file = LineFile(run.metrics)

    def handle(self, event: events.Event) -> None:
        def write(record: Struct) -> None:
            self._file.write(encode(record))

        match event:
            case events.Opened():
                with writing(self._run.config):
                    write_atomically(self._run.config, render_yaml(event.plan.config))
                with writing(self._run.env):
                    dump_environment(self._run.env, list(event.hosts))
            case events.Resumed():
                write(
                    records.ResumedRecord(
                        event.step,
                        time_s=event.elapsed_s,
                        elapsed_parts=render_parts(event.parts),
                        epoch=event.step / event.plan.steps_per_epoch,
                        **render_ranks(event.plan, event.num_hosts),
                        **render_changes(event),
                    )
                )
            case events.StepDone(is_reported=True):
                write(
                    records.TrainRecord(
                        event.step,
                        event.epoch,
                        event.time_s,
                        event.mean_loss,
                        event.learning_rate,
                        event.images_per_s,
                        event.scheduled_rate,
                    )
                )
            case events.LossScaleChanged():
                write(records.LossScaleRecord(event.step, event.before, event.now))
            case events.Evaluated():
                write(
                    records.EvalRecord(
                        epoch=event.epoch + 1,
                        time_s=event.time_s,
                        **asdict(event.accuracy),
                        dataset=self._dataset,
                    )
                )
            case (
                events.ReferenceFound()
                | events.Compared()
                | events.NetworkMeasured()
                | events.RanksTimed()
            ):
                write(event.record)
            case events.RecordsRead():
                write(
                    records.EpochRecord(
                        event.epoch + 1, dict(event.num_bytes), dict(event.num_new_bytes)
                    )
                )
            case events.ClockStepped():
                write(records.ClockStepRecord(event.host, event.step_s))
            case events.Ended(status='failed'):
                write(records.EndRecord('failed', None))
            case events.Ended():
                write(
                    records.EndRecord(
                        event.status,
                        event.epochs_to_converge,
                        event.time_s,
                        event.best_top1,
                        event.images_per_s,
                        event.checkpoint_s,
                        render_parts(event.parts),
                    )
                )

    def close(self) -> None:
        self._file.close()
