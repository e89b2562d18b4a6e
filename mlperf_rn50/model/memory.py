"""How much memory training takes on a GPU: an estimate, from the network's own graph and the configuration.

What a backward pass needs of the forward one stays until then; all else is shared, as MXNet plans it for a static
graph. Held against the resident set of training steps on a CPU: docs/launch.md says how far it is off.
"""
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mxnet as mx
from mxnet.gluon import HybridBlock

from mlperf_rn50.config import Config

# What the backward pass of an operator reads of its forward pass: its input, its output; both where it is not listed.
_READS = {'Convolution': 'i', 'FullyConnected': 'i', 'BatchNorm': 'i', 'Activation': 'o', 'Dropout': 'o',
          'elemwise_add': '', 'Flatten': '', 'Cast': '', 'Concat': '', 'Reshape': ''}
_IN_PLACE = ('Activation', 'elemwise_add', 'Flatten', 'Cast', 'Reshape')
# MXNet puts arrays of unlike sizes into one another's place, which leaves gaps: measured on a CPU.
_GAPS = 2.0
_MIB = 1 << 20
# Source: MXNet's Convolution (workspace, 1024 MB), Horovod's HOROVOD_FUSION_THRESHOLD.
_WORKSPACE, _FUSION = 1024 * _MIB, 64 * _MIB
# A rule of thumb: the driver's context with the code of MXNet, cuDNN and cuBLAS, and NCCL's channels.
_CONTEXT, _NCCL = 600 * _MIB, 300 * _MIB
# ImageNet's mean image, decoded.
_DECODED_BYTES = 400 * 350 * 3


class Node(NamedTuple):
    """An operator of a graph, or a variable (null), and the elements of its output for one image."""

    op: str
    inputs: tuple[int, ...]
    size: int


class NetworkSize(NamedTuple):
    """What a network takes, in elements.

    Args:
        kept: of a training step, from forward to backward, for an image.
        backward: most of gradients of activations at a time, for an image.
        evaluation: most of activations at a time in an evaluation, for an image.
        image: of the input.
        parameters: trained ones.
    """

    kept: int
    backward: int
    evaluation: int
    image: int
    parameters: int


def read_graph(net: HybridBlock, shape: tuple[int, int, int]) -> list[Node]:
    """The graph of an initialised network, in the order of the forward pass.

    Args:
        net: any network.
        shape: of one input, without the batch dimension.
    """
    symbol = net(mx.sym.var('data'))
    internals = symbol.get_internals()
    _, shapes, _ = internals.infer_shape(data=(1, *shape))
    sizes = {name: math.prod(s[1:]) for name, s in zip(internals.list_outputs(), shapes)}
    return [Node(n['op'], tuple(i[0] for i in n['inputs']),
                 next((sizes[n['name'] + end] for end in ('_output', '_output0', '') if n['name'] + end in sizes), 0))
            for n in json.loads(symbol.tojson())['nodes']]


def _arrays(graph: Sequence[Node], node: Node) -> list[int]:
    """The inputs of a node that other nodes made."""
    return [i for i in node.inputs if graph[i].op != 'null']


def kept_elements(graph: Sequence[Node]) -> int:
    """Elements that stay from the forward to the backward pass, for an image, without the input. Pure."""
    kept: set[int] = set()
    for number, node in enumerate(graph):
        if node.op != 'null':
            reads, inputs = _READS.get(node.op, 'io'), _arrays(graph, node)
            kept.update(inputs[:1] if 'i' in reads else (), (number,) if 'o' in reads else ())
    return sum(graph[i].size for i in kept)


def backward_elements(graph: Sequence[Node]) -> int:
    """Most elements of gradients that a backward pass has at a time, for an image. Pure."""
    live, most = {len(graph) - 1: graph[-1].size}, 0
    for number in range(len(graph) - 1, -1, -1):
        node = graph[number]
        if node.op == 'null':
            continue
        sizes = {i: graph[i].size for i in _arrays(graph, node)}
        own = live.get(number, 0) if node.op in _IN_PLACE else 0
        new = sum(size for i, size in sizes.items() if i not in live)
        added = sum(size for i, size in sizes.items() if i in live)  # a second gradient, before it is added
        most = max(most, sum(live.values()) + max(0, new - own) + added)
        live = {**sizes, **live}
        live.pop(number, None)
    return most


def forward_elements(graph: Sequence[Node]) -> int:
    """Most elements that a forward pass without gradients has at a time, for an image, without the input. Pure."""
    uses = Counter(i for node in graph for i in node.inputs)
    live: dict[int, int] = {}
    most = 0
    for number, node in enumerate(graph):
        if node.op == 'null':
            continue
        inputs = _arrays(graph, node)
        is_in_place = node.op in _IN_PLACE and any(uses[i] == 1 for i in inputs)
        most = max(most, sum(live.values()) + (0 if is_in_place else node.size))
        live[number] = node.size
        uses.subtract(inputs)
        live = {i: size for i, size in live.items() if uses[i] > 0 or i == number}
    return most


def network_size(net: HybridBlock, evaluated: HybridBlock, shape: tuple[int, int, int], parameters: int) -> NetworkSize:
    """What a network takes.

    Args:
        net: that is trained.
        evaluated: that which evaluations use of it.
        shape: of one image.
        parameters: trained elements.
    """
    graph = read_graph(net, shape)
    return NetworkSize(kept_elements(graph), backward_elements(graph), forward_elements(read_graph(evaluated, shape)),
                       math.prod(shape), parameters)


def _pipeline_bytes(network: NetworkSize, config: Config, batch: int) -> int:
    """What DALI has of a pipeline on the GPU: batches kept ready, one in the making, and one that is decoded. Pure."""
    data, width = config.data, 2 if config.train.precision == 'float16' else 4
    batches = batch * network.image * width * (data.prefetch_depth + 1)
    if data.synthetic:
        return batches
    nvjpeg = data.num_threads * data.device_memory_padding_mib * _MIB if data.decoder == 'mixed' else 0
    return batches + batch * max(_DECODED_BYTES, data.decoded_bytes_hint) + nvjpeg


def estimate_memory(network: NetworkSize, config: Config, local_batch_size: int, num_ranks: int) -> dict[str, int]:
    """Bytes on a GPU that a rank needs, by what for. Pure.

    Args:
        network: its size.
        config: of the run.
        local_batch_size: images of a training pass; of an evaluation, too, unless the configuration says another.
        num_ranks: of the run.
    """
    is_float16 = config.train.precision == 'float16'
    width = 2 if is_float16 else 4
    eval_batch = config.train.eval_batch_size or local_batch_size
    state = 8 if is_float16 else 4  # velocity and master weights
    # A step that may overflow keeps weights, velocity and masters as they were.
    before = width + state if is_float16 else 0
    return {
        'activations': local_batch_size * network.kept * width,
        'backward': round(local_batch_size * network.backward * width * _GAPS),
        'weights': network.parameters * 3 * width,  # with their gradients, and those of evaluations
        'optimizer': network.parameters * (state + before),
        'evaluation': eval_batch * network.evaluation * width,
        'workspace': _WORKSPACE,
        'pipeline': sum(_pipeline_bytes(network, config, batch) for batch in (local_batch_size, eval_batch)),
        'exchange': _NCCL + _FUSION if num_ranks > 1 else 0,
        'context': _CONTEXT}


def largest_batch(network: NetworkSize, config: Config, num_ranks: int, bytes_of_rank: int) -> int:
    """The largest number of images per rank that fits into so many bytes by the estimate; 0 for none. Pure."""
    def fits(batch: int) -> bool:
        return sum(estimate_memory(network, config, batch, num_ranks).values()) <= bytes_of_rank
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def memory_facts(network: NetworkSize, config: Config, local_batch_size: int, num_ranks: int,
                 card_bytes: int | None) -> Mapping[str, object] | None:
    """What the doctor checks of a rank's memory; None where the card does not tell how much it has."""
    if not card_bytes:
        return None
    share = card_bytes // config.run.ranks_per_device
    return {'parts': estimate_memory(network, config, local_batch_size, num_ranks), 'batch': local_batch_size,
            'share_bytes': share, 'num_sharing': config.run.ranks_per_device,
            'largest_batch': largest_batch(network, config, num_ranks, share)}
