"""The network in the words of the v0.5 log: model_hp_* tags, one per layer. Pure."""
from typing import Any

from mlperf_compliance import tags

from mlperf_rn50.config import Config
from mlperf_rn50.model.resnet import Unit, depth_of, side_after, units


def _shape(channels: int, side: int) -> str:
    return f'({channels}, {side}, {side})'


class _Describer:
    """Collects tags layer by layer while it follows the shape of the activations."""

    def __init__(self, config: Config):
        self._model = config.model
        self.parts: list[tuple[str, Any]] = []
        self.channels, self.side = 4 if config.data.pad_to_4_channels else 3, config.data.image_size

    def add(self, tag: str, value: Any = None) -> None:
        self.parts.append((tag, value))

    def conv(self, channels: int, stride: int) -> None:
        before = _shape(self.channels, self.side)
        self.channels, self.side = channels, side_after(self.side, stride)
        self.add(tags.MODEL_HP_CONV2D_FIXED_PADDING, f'{before} -> {_shape(self.channels, self.side)}')
        self.add(tags.MODEL_HP_CONV2D_FIXED_PADDING, {
            'stride': stride, 'filters': channels, 'initializer': 'xavier_gaussian_fan_in', 'use_bias': False})

    def norm(self) -> None:
        shape = _shape(self.channels, self.side)
        self.add(tags.MODEL_HP_BATCH_NORM, {
            'shape': f'{shape} -> {shape}', 'momentum': self._model.bn_momentum, 'epsilon': self._model.bn_epsilon,
            'center': True, 'scale': True, 'training': True})

    def unit(self, unit: Unit) -> None:
        kind = 'bottleneck_block' if unit.is_bottleneck else 'basic_block'
        inside = _shape(self.channels, self.side)
        self.add(tags.MODEL_HP_BEGIN_BLOCK, {'block_type': kind})
        self.add(tags.MODEL_HP_BLOCK_TYPE, kind)
        self.add(tags.MODEL_HP_RESNET_TOPOLOGY, f'Block Input: {inside}')
        for layer in unit.layers:
            self.conv(layer.out_channels, layer.stride)
            self.norm()
            if layer.has_relu:
                self.add(tags.MODEL_HP_RELU)
        outside = _shape(self.channels, self.side)
        if unit.has_projection:
            self.add(tags.MODEL_HP_PROJECTION_SHORTCUT, f'{inside} -> {outside}')
            self.norm()
        self.add(tags.MODEL_HP_END_BLOCK, f'Block Output: {outside}')
        self.add(tags.MODEL_HP_SHORTCUT_ADD)
        self.add(tags.MODEL_HP_RELU)


def describe(config: Config) -> list[tuple[str, Any]]:
    """(tag, value) for the configured network, in the order of its layers; none for those that are no ResNet."""
    if not config.model.name.startswith('resnet'):
        return []
    d = _Describer(config)
    d.add(tags.MODEL_HP_INITIAL_SHAPE, [d.channels, d.side, d.side])
    d.conv(64, 2)
    d.norm()
    d.add(tags.MODEL_HP_RELU)
    before, d.side = _shape(d.channels, d.side), side_after(d.side, 2)
    d.add(tags.MODEL_HP_INITIAL_MAX_POOL, f'{before} -> {_shape(d.channels, d.side)}')
    for unit in units(depth_of(config.model)):
        d.unit(unit)
    d.add(tags.MODEL_HP_DENSE, config.data.num_classes)
    d.add(tags.MODEL_HP_FINAL_SHAPE, config.data.num_classes)
    return d.parts
