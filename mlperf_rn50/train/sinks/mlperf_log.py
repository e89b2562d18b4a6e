"""The MLPerf log of a run, with the model_hp_* tags of the v0.5 log, which describe the network
layer by layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlperf_compliance import tags

from mlperf_rn50.config import Config
from mlperf_rn50.mllog.elapsed import render_parts
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.model.resnet import ResidualUnit, depth_of, side_after, units
from mlperf_rn50.train import run_events as events
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
                warmup_epochs = plan.config.schedule.warmup_epochs
                log.hyperparameters(
                    scaled(plan),
                    global_batch_size=plan.global_batch_size,
                    local_batch_size=plan.local_batch_size,
                    decay_steps=plan.decay_steps,
                    warmup_steps=round(warmup_epochs * plan.steps_per_epoch),
                    last_step_lr_factor=plan.fraction(plan.steps_per_epoch - 1),
                )
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
                epoch = event.step // event.plan.steps_per_epoch
                if event.time_s is not None:
                    log.set_time(event.time_s)
                log.run_resumed(
                    event.step,
                    epoch,
                    event.clock_s,
                    stopped_s=event.stopped_s,
                    after_fault=event.after_fault,
                    **resumed_facts(event),
                )
                log.open_options(event.plan.config)  # may be changed
            case events.EpochStarted():
                if event.block_epochs:
                    log.block_start(event.epoch, event.block_epochs)
                log.epoch_start(event.epoch)
            case events.EpochDone():
                log.epoch_stop(event.epoch, event.images_per_s, event.learning_rate)
            case events.LossScaleChanged():
                log.loss_scale(event.record.step, event.record.now)
            case events.ClockStepped():
                log.clock_step(event.record.host, event.record.step_s)
            case events.EvalStarted():
                log.eval_start(event.epoch)
            case events.Evaluated():
                log.eval_stop(event.epoch, event.accuracy.top1)
                log.block_stop(event.first_epoch)
            case events.Ended():
                log.run_stop(event.status, render_parts(event.parts))

    def close(self) -> None:
        self._log.close()


def scaled(plan: Plan) -> Config:
    """Return the configuration with the learning rates of this plan, which may have fewer ranks
    than configured."""
    s, factor = plan.config.schedule, plan.lr_scale
    schedule = replace(s, base_lr=factor * s.base_lr, end_lr=factor * s.end_lr)
    return replace(plan.config, schedule=schedule)


def resumed_facts(event: events.Resumed) -> dict[str, Any]:
    """Return what log and metrics have in common about a resume: parts of its time, ranks, global
    batch size, factor on the learning rate, and changed keys with their values [before, now]."""
    plan, changed = event.plan, {c.key: [c.before, c.now] for c in event.changes}
    return {
        'elapsed_parts': render_parts(event.parts),
        'number_of_ranks': plan.world_size,
        'number_of_nodes': len(event.hosts),
        'global_batch_size': plan.global_batch_size,
        'lr_scale': plan.lr_scale,
        **({'changed': changed} if changed else {}),
    }


class _Describer:
    """Makes the v0.5 (tag, value) pairs of each layer in order, and keeps the current shape of the
    activations."""

    def __init__(self, config: Config):
        self._config = config
        self.channels, self.side = 4 if config.data.pad_to_4_channels else 3, config.data.size_of()

    @property
    def shape(self) -> str:
        return f'({self.channels}, {self.side}, {self.side})'

    def conv(self, channels: int, stride: int) -> Iterator[tuple[str, Any]]:
        before = self.shape
        self.channels, self.side = channels, side_after(self.side, stride)
        yield tags.MODEL_HP_CONV2D_FIXED_PADDING, f'{before} -> {self.shape}'
        layer = {'stride': stride, 'filters': channels, 'initializer': 'xavier_gaussian_fan_in'}
        yield tags.MODEL_HP_CONV2D_FIXED_PADDING, {**layer, 'use_bias': False}

    def norm(self) -> tuple[str, Any]:
        model = self._config.model
        return tags.MODEL_HP_BATCH_NORM, {
            'shape': f'{self.shape} -> {self.shape}',
            'momentum': model.bn_momentum,
            'epsilon': model.bn_epsilon,
            'center': True,
            'scale': True,
            'training': True,
        }

    def unit(self, unit: ResidualUnit) -> Iterator[tuple[str, Any]]:
        kind = 'bottleneck_block' if unit.is_bottleneck else 'basic_block'
        inside = self.shape
        yield tags.MODEL_HP_BEGIN_BLOCK, {'block_type': kind}
        yield tags.MODEL_HP_BLOCK_TYPE, kind
        yield tags.MODEL_HP_RESNET_TOPOLOGY, f'Block Input: {inside}'
        for layer in unit.layers:
            yield from self.conv(layer.out_channels, layer.stride)
            yield self.norm()
            if layer.has_relu:
                yield tags.MODEL_HP_RELU, None
        if unit.has_projection:
            yield tags.MODEL_HP_PROJECTION_SHORTCUT, f'{inside} -> {self.shape}'
            yield self.norm()
        yield tags.MODEL_HP_END_BLOCK, f'Block Output: {self.shape}'
        yield tags.MODEL_HP_SHORTCUT_ADD, None
        yield tags.MODEL_HP_RELU, None

    def network(self) -> Iterator[tuple[str, Any]]:
        data = self._config.data
        yield tags.MODEL_HP_INITIAL_SHAPE, [self.channels, self.side, self.side]
        yield from self.conv(64, 2)
        yield self.norm()
        yield tags.MODEL_HP_RELU, None
        before, self.side = self.shape, side_after(self.side, 2)
        yield tags.MODEL_HP_INITIAL_MAX_POOL, f'{before} -> {self.shape}'
        for unit in units(depth_of(self._config.model)):
            yield from self.unit(unit)
        yield tags.MODEL_HP_DENSE, data.num_classes
        yield tags.MODEL_HP_FINAL_SHAPE, data.num_classes


def describe_layers(config: Config) -> list[tuple[str, Any]]:
    """Return the (tag, value) pairs of a network in the order of its layers, or empty if it is not
    a ResNet."""
    return list(_Describer(config).network()) if config.model.is_resnet else []
