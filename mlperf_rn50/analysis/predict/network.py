"""Gradients that the ranks of a run exchange, from its records or its configuration. The files are untrusted."""
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from mlperf_rn50.analysis.predict.prediction import Link
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.config_file import load_tree
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder, run_of
from mlperf_rn50.runfolder.records import MetricsRecord, NetworkRecord

_MAX_CONFIG_BYTES, _MAX_CLASSES = 1 << 14, 10**6
_CLASSES = 1000  # of the numbers of parameters
# Trained parameters, and inputs of the last layer, of the networks at their own image size.
_NETWORKS = {'resnet18': (11_689_512, 512), 'resnet34': (21_797_672, 512), 'resnet50': (25_557_032, 2048),
             'resnet101': (44_549_160, 2048), 'resnet152': (60_192_808, 2048), 'alexnet': (61_100_840, 4096),
             'googlenet': (6_998_552, 1024), 'inception_v3': (23_834_568, 2048), 'inception_v4': (42_679_816, 1536),
             'vgg16': (138_357_544, 4096), 'vgg19': (143_667_240, 4096)}


def with_network(link: Link, run_set: RunSet) -> tuple[Link, tuple[str, ...]]:
    """Return a link with the gradients of the network that a set's run folder names; a note if it names none.

    Published sets, and other logs on ImageNet, are of ResNet-50.
    """
    folder = run_of(run_set.readable[-1].path)
    lines: Iterator[tuple[int, MetricsRecord]] = read_lines(folder.metrics, MetricsRecord)  # type: ignore[arg-type]
    for _, record in lines:
        if isinstance(record, NetworkRecord) and record.gradient_bytes:
            return Link(link.gbit_s, record.gradient_bytes, link.source, network=f'logged in {folder.metrics.name}'), ()
    with suppress(ConfigError, ValueError, LookupError, TypeError, msgspec.MsgspecError):
        num_bytes, text = _configured(folder)
        return Link(link.gbit_s, num_bytes, link.source, network=text), ()
    return link, () if run_set.is_imagenet else (
        f'Network unknown: gradients of ResNet-50 assumed ({link.exchange_bytes / 1e6:.1f} MB); keep config.yaml and '
        'metrics.jsonl beside the log',)


def _configured(folder: RunFolder) -> tuple[int, str]:
    """Return the bytes of the gradients, and the network with its classes, by the configuration of a run."""
    tree = msgspec.convert(load_tree(folder.config, _MAX_CONFIG_BYTES), dict[str, dict[str, Any]])
    model, train = tree['model'], tree['train']
    name = model.get('name') or f'resnet{model["depth"]}'  # the key of earlier versions
    num_classes = msgspec.convert(tree['data']['num_classes'], Annotated[int, msgspec.Meta(ge=1, le=_MAX_CLASSES)])
    is_half = train.get('precision') == 'float16' or tree.get('comm', {}).get('compression') == 'fp16'
    return (2 if is_half else 4) * num_parameters(name, num_classes), (
        f'{name} with {num_classes:,} classes, {folder.config.name}')


def num_parameters(network: str, num_classes: int) -> int:
    """Return the number of trained parameters, without the extra channel of data.pad_to_4_channels."""
    num, num_inputs = _NETWORKS[network]
    return num + (num_inputs + 1) * (num_classes - _CLASSES)
