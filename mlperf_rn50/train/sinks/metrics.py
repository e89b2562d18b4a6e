"""Machine-readable files of a run: metrics.jsonl, config.yaml and env.json."""
import json
from dataclasses import asdict
from typing import Any

from mlperf_rn50.config import render_yaml
from mlperf_rn50.files import LineFile, write_atomically, writing
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.environment import dump_environment
from mlperf_rn50.train import events
from mlperf_rn50.train.sinks.mlperf_log import render_changes, render_ranks


class Metrics:
    def __init__(self, run: RunFolder, dataset: str):
        self._run, self._dataset = run, dataset
        self._file = LineFile(run.metrics)

    def handle(self, event: events.Event) -> None:
        def write(**values: Any) -> None:
            self._file.write(json.dumps(values))
        match event:
            case events.Opened():
                with writing(self._run.config):
                    write_atomically(self._run.config, render_yaml(event.config))
                with writing(self._run.env):
                    dump_environment(self._run.env, list(event.hosts))
            case events.Resumed():
                write(event='resumed', step=event.step, **render_ranks(event.plan, event.num_hosts),
                      **render_changes(event))
            case events.StepDone(is_reported=True):
                write(event='train', step=event.step, epoch=event.epoch, time_s=event.time_s, loss=event.mean_loss,
                      learning_rate=event.learning_rate, images_per_s=event.images_per_s)
            case events.LossScaleChanged():
                write(event='loss_scale', step=event.step, before=event.before, now=event.now)
            case events.Evaluated():
                write(event='eval', epoch=event.epoch + 1, time_s=event.time_s, **asdict(event.accuracy),
                      dataset=self._dataset)
            case events.ReferenceFound():
                write(event='reference', **event.record)
            case events.Compared():
                write(event='course', **event.record)
            case events.RecordsRead():
                write(event='epoch', epoch=event.epoch + 1, record_bytes=dict(event.num_bytes),
                      new_record_bytes=dict(event.num_new_bytes))
            case events.RanksTimed():
                write(event='ranks', epoch=event.epoch + 1, time_s=event.time_s, ranks=list(event.ranks),
                      stragglers=list(event.stragglers))
            case events.ClockStepped():
                write(event='clock_step', host=event.host, step_s=event.step_s)
            case events.Ended(status='failed'):
                write(event='end', status='failed', epochs_to_converge=None)
            case events.Ended():
                write(event='end', status=event.status, epochs_to_converge=event.epochs_to_converge,
                      time_to_train_s=event.time_s, best_top1=event.best_top1, images_per_s=event.images_per_s)

    def close(self) -> None:
        self._file.close()
