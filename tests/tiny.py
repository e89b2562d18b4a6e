"""A tiny training: ResNet-18 on synthetic images of 16x16 pixels, with the fixture thin_resnets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.data.batches import synthetic_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.train.build import build, start_clock
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.loop import TrainingRun
from mlperf_rn50.train.options import CheckpointConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.run import RunArguments, open_run
from mlperf_rn50.train.trainer import Trainer
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def tiny_config(num_images=20, data=None, model=None, **train) -> Config:
    sizes = {'num_val': 8, 'num_classes': 3, 'image_size': 16, 'resize_shorter': 16}
    return Config(
        data=DataConfig(num_train=num_images, **{'synthetic': True, **sizes, **(data or {})}),
        model=ModelConfig(name='resnet18', **(model or {})),
        schedule=ScheduleConfig(warmup_epochs=0),
        train=TrainConfig(**{'local_batch_size': min(8, num_images), **train}),
    )


def tiny_training(config: Config, comm: Comm | None = None, **callbacks):
    """Return a trainer and its endless batches."""
    plan = make_plan(config, 1)
    trainer = Trainer(plan, comm or Comm(), 0, None, **callbacks)
    return trainer, synthetic_batches(config, plan.train_shard(), None)


class Recorder:
    """Sink that lists the events of a run and passes each on."""

    def __init__(self, on_event: Callable):
        self.events, self._on_event = [], on_event

    def handle(self, event):
        self.events.append(event)
        self._on_event(event)

    def of(self, kind) -> list:
        return [e for e in self.events if isinstance(e, kind)]

    def close(self):
        pass


@contextmanager
def tiny_run(
    folder, config: Config, on_event: Callable = lambda event, run: None, **checkpoint
) -> Iterator[tuple[TrainingRun, Recorder]]:
    """Start the clock of a run of one epoch without a warm-up; on_event gets each event and the
    run."""
    config = replace(
        config,
        run=RunConfig(dir=str(folder), seed=1, metrics_period_steps=2),
        train=replace(config.train, max_epochs=1, eval_period=1, num_warmup_steps=0),
        checkpoint=CheckpointConfig(**{'keep': 99, 'period_epochs': 0, **checkpoint}),
    )
    with open_run(RunArguments(config, Comm(), Heartbeat())) as opened:
        run = start_clock(build(opened))
        recorder = Recorder(lambda event: on_event(event, run))
        run.sinks.append(recorder)
        yield run, recorder
