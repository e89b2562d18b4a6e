"""TensorBoard events: losses, learning rate, norms, LARS ratios, rank times and hyperparameters."""

import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar, text

from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.files import writing
from mlperf_rn50.runfolder.records import TrainRecord
from mlperf_rn50.train import run_events as events


class TensorBoard:
    """Writer of an event file; SummaryWriter is not used because its thread hides the errors of a
    full disk."""

    def __init__(self, folder: Path, first_step: int, config: Config):
        """Open the file; a resumed run (first_step above 0) invalidates the events of later
        steps."""
        self._folder, self._step = folder, first_step
        self._dataset = config.data.dataset + ('_synthetic' if config.data.synthetic else '')
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / 'events'))
            if first_step:
                self._put(first_step + 1, session_log=SessionLog(status=SessionLog.START))
            table = ['| key | value |', '|---|---|']
            for section, keys in to_tree(config).items():
                table += [f'| {section}.{key} | {value} |' for key, value in keys.items()]
            self._put(0, summary=text('configuration', '\n'.join(table)))

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.StepDone):
            self._step = event.step
        with writing(self._folder):
            match event:
                case events.StepDone(record=TrainRecord() as record):
                    self._add('train/loss', record.loss)
                    self._add('train/learning_rate', event.learning_rate)
                    self._add('speed/images_per_s', event.images_per_s)
                    if event.gradient_norm is not None:
                        self._add('train/gradient_norm', event.gradient_norm)
                    for name, ratio in event.trust_ratios.items():
                        self._add(f'lars_ratio/{name}', ratio)
                case events.Evaluated():
                    self._add(f'accuracy/top1_{self._dataset}', event.accuracy.top1)
                    self._add(f'accuracy/top5_{self._dataset}', event.accuracy.top5)
                case events.EpochDone():
                    self._add('speed/images_per_s_of_epoch', event.images_per_s)
                case events.RanksTimed():
                    for rank in event.record.ranks:
                        for part in ('data', 'compute', 'wait'):
                            ms = 1000 * getattr(rank, f'{part}_s') / max(1, rank.num_steps)
                            self._add(f'{part}_ms_per_step/rank_{rank.rank}_{rank.host}', ms)
                case events.Ended():
                    self._add('run/epochs_to_converge', event.epochs_to_converge or 0)
                    self._add('run/time_s', event.time_s)
                case _:
                    return
            self._writer.flush()

    def _put(self, step: int, **content: Any) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))

    def _add(self, tag: str, value: float | None) -> None:
        self._put(self._step, summary=scalar(tag, value))

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()
