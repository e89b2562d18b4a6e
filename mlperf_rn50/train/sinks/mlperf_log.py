"""The MLPerf log of a run."""
from typing import Any

from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.model.describe import describe_layers
from mlperf_rn50.train import events
from mlperf_rn50.train.plan import Plan


class MlperfLog:
    def __init__(self, log: RunLog):
        self._log = log

    def handle(self, event: events.Event) -> None:
        log = self._log
        match event:
            case events.Opened():
                plan = event.plan
                log.submission(plan.config)
                log.cache_clear(event.is_cache_clear, event.cache_reason)
                log.init_start()
                log.seed(event.seed)
                log.hyperparameters(plan.config, plan.global_batch_size, plan.local_batch_size, plan.decay_steps,
                                    round(plan.config.schedule.warmup_epochs * plan.steps_per_epoch),
                                    plan.fraction(plan.steps_per_epoch - 1))
            case events.Built():
                log.model(describe_layers(event.plan.config), event.tensor_names)
                if event.initial_weights:
                    log.initial_weights(event.initial_weights, event.notes)
            case events.InitStopped():
                log.init_stop()
            case events.RunStarted():
                log.run_start()
                log.data(event.plan.config, event.plan.world_size, event.num_hosts)
            case events.Resumed():
                log.run_resumed(event.step, event.step // event.plan.steps_per_epoch, event.clock_s,
                                **render_ranks(event.plan, event.num_hosts), **render_changes(event))
            case events.EpochStarted():
                if event.block_epochs:
                    log.block_start(event.epoch, event.block_epochs)
                log.epoch_start(event.epoch)
            case events.EpochDone():
                log.epoch_stop(event.epoch, event.images_per_s, event.learning_rate)
            case events.LossScaleChanged():
                log.loss_scale(event.step, event.now)
            case events.ClockStepped():
                log.clock_step(event.host, event.step_s)
            case events.EvalStarted():
                log.eval_start(event.epoch)
            case events.Evaluated():
                log.eval_stop(event.epoch, event.accuracy.top1)
                log.block_stop(event.first_epoch)
            case events.Ended():
                log.run_stop(event.status)

    def close(self) -> None:
        self._log.close()


def render_changes(event: events.Resumed) -> dict[str, Any]:
    """Return each changed configuration key of a resumed run with its values [before, now]; {} without changes."""
    return {'changed': {c.key: [c.before, c.now] for c in event.changes}} if event.changes else {}


def render_ranks(plan: Plan, num_hosts: int) -> dict[str, Any]:
    """Return a resumed run's ranks, nodes, global batch size and learning rate factor."""
    return {'number_of_ranks': plan.world_size, 'number_of_nodes': num_hosts,
            'global_batch_size': plan.global_batch_size, 'lr_scale': plan.lr_scale}
