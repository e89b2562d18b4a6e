"""metrics.jsonl, config.yaml and env.json: a run for programs."""
from mlperf_rn50.config import render_yaml
from mlperf_rn50.files import write_atomically
from mlperf_rn50.system.environment import dump_environment
from mlperf_rn50.train import events
from mlperf_rn50.train.run_folder import RunFolder
from mlperf_rn50.train.sinks.mlperf_log import ranks_now


class Metrics:
    """Writes the files of a run that are not its log."""

    def __init__(self, run: RunFolder):
        self._run, self._dataset = run, ''

    def see(self, event: events.Event) -> None:
        write = self._run.append_metrics
        match event:
            case events.Opened():
                write_atomically(self._run.config, render_yaml(event.config))
                dump_environment(self._run.env, list(event.hosts))
            case events.RunStarted():
                self._dataset = event.plan.config.data.dataset
            case events.Resumed():
                self._dataset = event.plan.config.data.dataset
                write(event='resumed', step=event.step, **ranks_now(event.plan, event.num_hosts))
            case events.StepDone(is_reported=True):
                write(event='train', step=event.step, epoch=event.epoch, time_s=event.time_s, loss=event.mean_loss,
                      learning_rate=event.learning_rate, images_per_s=event.images_per_s)
            case events.Evaluated():
                write(event='eval', epoch=event.epoch + 1, time_s=event.time_s, num_top1=event.num_top1,
                      num_top5=event.num_top5, num_images=event.num_images, dataset=self._dataset)
            case events.RecordsRead():
                write(event='epoch', epoch=event.epoch + 1, record_bytes=dict(event.num_bytes),
                      new_record_bytes=dict(event.num_new_bytes))
            case events.RanksTimed():
                write(event='ranks', epoch=event.epoch + 1, time_s=event.time_s, ranks=list(event.ranks),
                      stragglers=list(event.stragglers))
            case events.Ended(status='failed'):
                write(event='end', status='failed', epochs_to_converge=None)
            case events.Ended():
                write(event='end', status=event.status, epochs_to_converge=event.epochs_to_converge,
                      time_to_train_s=event.time_s, best_top1=event.best_top1, images_per_s=event.images_per_s)

    def close(self) -> None:
        pass
