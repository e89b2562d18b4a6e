"""The run for TensorBoard: losses, learning rate, norms, LARS ratios, times of ranks, hyper-parameters."""
from pathlib import Path

from tensorboardX import SummaryWriter

from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.train import events


class TensorBoard:
    """Writes an event file; its step is the number of optimizer steps."""

    def __init__(self, folder: Path, first_step: int):
        """A run that goes on takes back what was written of later steps."""
        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=first_step + 1 if first_step else None)
        self._step = 0
        self._dataset = ''

    def see(self, event: events.Event) -> None:
        match event:
            case events.RunStarted() | events.Resumed():
                self._start(event.plan.config)
            case events.StepDone(is_reported=True):
                self._train(event)
            case events.Evaluated():
                self._add(f'accuracy/top1_{self._dataset}', event.top1)
                self._add(f'accuracy/top5_{self._dataset}', event.top5)
            case events.EpochDone():
                self._add('speed/images_per_s_of_epoch', event.images_per_s)
            case events.RanksTimed():
                self._ranks(event)
            case events.Ended():
                self._add('run/epochs_to_converge', event.epochs_to_converge or 0)
                self._add('run/time_s', event.time_s)

    def _add(self, tag: str, value: float) -> None:
        self._writer.add_scalar(tag, value, self._step)

    def _start(self, config: Config) -> None:
        self._dataset = config.data.dataset + ('_synthetic' if config.data.synthetic else '')
        rows = [f'| {s}.{k} | {v} |' for s, keys in to_tree(config).items() for k, v in keys.items()]
        self._writer.add_text('configuration', '\n'.join(['| key | value |', '|---|---|', *rows]))

    def _train(self, event: events.StepDone) -> None:
        self._step = event.step
        self._add('train/loss', event.mean_loss)
        self._add('train/learning_rate', event.learning_rate)
        self._add('speed/images_per_s', event.images_per_s)
        if event.gradient_norm is not None:
            self._add('train/gradient_norm', event.gradient_norm)
        for name, ratio in event.trust_ratios.items():
            self._add(f'lars_ratio/{name}', ratio)

    def _ranks(self, event: events.RanksTimed) -> None:
        for rank in event.ranks:
            for part in ('data', 'compute', 'wait'):
                self._add(f'{part}_ms_per_step/rank_{rank["rank"]}_{rank["host"]}',
                          1000 * rank[f'{part}_s'] / max(1, rank['num_steps']))

    def close(self) -> None:
        self._writer.close()
