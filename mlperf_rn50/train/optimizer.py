"""SGD with momentum, and LARS, built on MXNet's fused update operators.

mx.optimizer.LARS is not used because it corrects the momentum only for the first few tensors of a
step. Source: You et al. 2017 (https://arxiv.org/abs/1708.03888), with the momentum scaled by lr_now
/ lr_previous as in Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, section 3).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
from mxnet import autograd, nd
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from mlperf_rn50.text import grouped
from mlperf_rn50.train.options import OptimizerConfig

# maximum number of arrays per call of multi_all_finite, which does not check this limit
_MAX_CHECKED = 200
# elements between the starts of tensors in a flat array; float16 kernels need multiples of 16 bytes
_ALIGNMENT = 128


@dataclass(frozen=True)
class Tensor:
    """A trained tensor and the arrays that its update uses; master: float32 copy of a float16
    weight.

    lr_factor: factor on the learning rate.
    """

    name: str
    weight: NDArray
    grad: NDArray
    velocity: NDArray
    master: NDArray | None
    decay: float
    lr_factor: float

    @property
    def is_adapted(self) -> bool:
        """True if LARS computes a learning rate for this tensor."""
        return self.name.endswith('_weight')

    @property
    def exact(self) -> NDArray:
        """The weight in float32."""
        return self.weight if self.master is None else self.master

    @cached_property  # cached because each step reads it for each tensor
    def arrays(self) -> list[NDArray]:
        """The inputs of an update operator, in order."""
        inputs = [self.weight, self.grad, self.velocity]
        return inputs if self.master is None else [*inputs, self.master]


@dataclass(frozen=True)
class Flat:
    """Memory of all weights and their state, in one order with the float16 weights first.

    state: velocities, and masters or float32 weights; float32, shape (2, elements). half: float16
    weights, as many elements of the start. starts: first element of each parameter, by its name.
    """

    state: NDArray
    half: NDArray
    starts: Mapping[str, int]

    def view(self, row: NDArray, param: Parameter) -> NDArray:
        """Return a parameter's part of `half` or of a row of `state`."""
        start = self.starts[param.name]
        return row[start : start + math.prod(param.shape)].reshape(param.shape)

    def keep_if(self, condition: NDArray, before: NDArray) -> None:
        """Keep the current state if condition, of shape (1,), is 1, else restore `before`; then
        round the masters."""
        now = self.state.reshape((1, -1))
        nd.where(condition, now, before.reshape((1, -1)), out=now)
        nd.cast(self.state[1][: self.half.size], dtype='float16', out=self.half)


def group_size(device_type: str, name: str) -> int:
    """Return the maximum number of tensors per call of an update operator; 1 selects single-tensor
    operators. Pure.

    On a CPU, many tensors or unequal sizes per call are slow: a tensor takes 3.5 times as long
    among 60 as among 4 of similar size, and SGD is fastest with 1. On a GPU, fewer calls are
    faster; MLPerf submissions use 54, and the maximum is 60.
    """
    return 54 if device_type == 'gpu' else {'sgd': 1, 'lars': 4}[name]


class Bucket:
    """Tensors of one dtype whose gradients are exchanged together."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.last = tensors[-1].grad  # the gradient that is computed last
        # Weights come first, as the LARS operators require. Both parts are sorted by size, largest
        # first.
        self.tensors = sorted(tensors, key=lambda t: (not t.is_adapted, -t.weight.size, t.name))
        self.grads = [t.grad for t in self.tensors]
        self.num_adapted = sum(t.is_adapted for t in self.tensors)
        context = self.tensors[0].weight.context
        self.decays = nd.array([t.decay for t in self.tensors], context)
        self.lr_factors = nd.array([t.lr_factor for t in self.tensors], context)
        # of the names of update operators, which update the float32 masters of float16 weights
        self.prefix = '' if self.tensors[0].master is None else 'mp_'

    def groups(self, size: int) -> list[slice]:
        num = len(self.tensors)
        return [slice(i, min(i + size, num)) for i in range(0, num, size)]


class Optimizer:
    """SGD or LARS, which updates parameters in place.

    SGD and LARS follow MXNet's sgd_mom_update: v = m v - lr (g + wd w), w = w + v; LARS has an lr
    per tensor. Nesterov follows nag_mom_update: w = w + m v - lr (g + wd w), and wd in the stored v
    applies to the new w. A partly filled batch scales lr by its filled fraction, so that every
    image has equal weight; earlier velocity applies in full.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        config: OptimizerConfig,
        num_buckets: int = 1,
        can_skip: bool = False,
    ):
        """Take initialised parameters by name, in forward order; backward computes their gradients
        in reverse.

        With can_skip, weights and state are moved to flat arrays, so that skipping a step takes a
        few operators.
        """
        self._config = config
        backward = list(params.items())[::-1]
        self._flat = _move_to_flat([p for _, p in backward]) if can_skip else None
        self.tensors = _make_tensors(backward, config, self._flat)
        dtypes = [np.dtype(t.weight.dtype) for t in self.tensors]
        num_bytes = [t.weight.size * dtype.itemsize for t, dtype in zip(self.tensors, dtypes)]
        cuts = cut_buckets(num_bytes, [dtype.name for dtype in dtypes], num_buckets)
        self.buckets = [Bucket([self.tensors[i] for i in cut]) for cut in cuts]
        self.group_size = group_size(self.tensors[0].weight.context.device_type, config.name)
        self.last_lr: float | None = None
        self._applied: list[tuple[Bucket, NDArray, float]] = []

    def state(self) -> dict[str, NDArray]:
        """Return the arrays that a resumed run needs, by name, without copying them."""
        velocities = {f'velocity/{t.name}': t.velocity for t in self.tensors}
        masters = {f'master/{t.name}': t.master for t in self.tensors if t.master is not None}
        return velocities | masters

    def owners(self) -> dict[str, NDArray]:
        """Return the arrays that own the memory of weights and state, by name; no two of them share
        memory.

        An exchange of several views of one array would wait for itself in MXNet's engine, which
        sees one variable.
        """
        if self._flat:
            return {'state': self._flat.state, 'half': self._flat.half}
        return {t.name: t.weight for t in self.tensors} | self.state()

    def reset_masters(self) -> None:
        for tensor in self.tensors:
            if tensor.master is not None:
                tensor.master[:] = tensor.weight.astype('float32')

    def step(
        self,
        lr: float,
        fraction: float = 1.0,
        rescale: float = 1.0,
        is_finite: NDArray | None = None,
    ) -> float:
        """Update the tensors from the current gradients, each bucket as soon as its gradients are
        ready.

        Return the learning rate applied to them, lr * fraction.

        Args:
            fraction: filled fraction of the global batch, above 0 and at most 1.
            rescale: factor that converts the current gradients to those of the mean loss.
            is_finite: shape (1,), 0 if the step must be skipped; required with can_skip, otherwise
                None.
        """
        correction, applied = self.correction(lr), lr * fraction
        before = self._flat.state.copy() if self._flat else None
        self._applied.clear()
        for bucket in self.buckets:
            if self._config.name == 'lars':
                momentum = self._config.momentum * correction
                self._update_with_rates(bucket, applied, momentum, rescale)
            elif self._config.nesterov or self.group_size == 1:
                self._update_each(bucket, applied, rescale)
            else:
                self._update_with_one_rate(bucket, applied, rescale)
        if self._flat and before is not None and is_finite is not None:
            # Correct the velocity even if the step is skipped, because only the device knows that
            # it is.
            if correction != 1:
                before[0] *= correction
            self._flat.keep_if(is_finite, before)
        self.last_lr = lr
        return applied

    def correction(self, lr: float) -> float:
        """Return the velocity's factor for a changed learning rate; 1 with SGD."""
        return lr / self.last_lr if self.last_lr and self._config.name == 'lars' else 1.0

    def all_finite(self) -> NDArray:
        """Return an array of shape (1,): 1 if all gradients are finite, otherwise 0."""
        result = nd.ones((1,), self.tensors[0].weight.context)
        for bucket in self.buckets:
            for group in bucket.groups(_MAX_CHECKED):
                grads = bucket.grads[group]
                nd.multi_all_finite(*grads, num_arrays=len(grads), init_output=False, out=result)
        return result

    def squared_norms(self) -> NDArray:
        """Return the sum of squares of each current gradient, in bucket order, as an array of shape
        (tensors,)."""
        return nd.concat(*(_sums_of_squares(b.grads) for b in self.buckets), dim=0)

    def trust_ratios(self) -> list[tuple[list[str], NDArray]]:
        """Return the names of each bucket's weights and LARS's factors on their learning rates in
        the last step; without a learning rate, they are not known."""
        ratios = []
        for b, rates, lr in self._applied:
            n = b.num_adapted
            if n and lr:
                names = [t.name for t in b.tensors[:n]]
                ratios.append((names, rates[:n] / (b.lr_factors[:n] * lr)))
        return ratios

    def _update_each(self, bucket: Bucket, lr: float, rescale: float) -> None:
        """Update by SGD tensor by tensor, as Nesterov momentum requires: MXNet has no multi-tensor
        operator for it."""
        if self._config.nesterov:
            update = getattr(nd, f'{bucket.prefix}nag_mom_update')
        else:
            update = partial(getattr(nd, f'{bucket.prefix}sgd_mom_update'), lazy_update=False)
        for tensor in bucket.tensors:
            update(
                *tensor.arrays,
                out=tensor.weight,
                momentum=self._config.momentum,
                lr=lr * tensor.lr_factor,
                wd=tensor.decay,
                rescale_grad=rescale,
            )

    def _update_with_one_rate(self, bucket: Bucket, lr: float, rescale: float) -> None:
        """Update by SGD, in groups of tensors."""
        update = getattr(nd, f'multi_{bucket.prefix}sgd_mom_update')
        for group in bucket.groups(self.group_size):
            tensors = bucket.tensors[group]
            update(
                *(a for t in tensors for a in t.arrays),
                out=[t.weight for t in tensors],
                lrs=[lr * t.lr_factor for t in tensors],
                wds=[t.decay for t in tensors],
                num_weights=len(tensors),
                momentum=self._config.momentum,
                rescale_grad=rescale,
            )

    def _update_with_rates(
        self, bucket: Bucket, lr: float, momentum: float, rescale: float
    ) -> None:
        """Update by LARS, in groups of tensors, with learning rates that stay on the device.

        The rate of a tensor is its lr, times eta |w| / (|g| + wd |w| + eps) for weights.
        """
        n, rates = bucket.num_adapted, bucket.lr_factors * lr
        if n:
            nd.multi_lars(
                rates[:n],
                _sums_of_squares([t.weight for t in bucket.tensors[:n]]),
                _sums_of_squares(bucket.grads[:n]),
                bucket.decays[:n],
                eta=self._config.lars_eta,
                eps=self._config.lars_epsilon,
                rescale_grad=rescale,
                out=rates[:n],
            )
        self._applied.append((bucket, rates, lr))
        kind = f'multi_{bucket.prefix}sgd_mom_update'
        # NVIDIA's MXNet 1.8 has the same operators with a different prefix (lars_multi_sgd.cc).
        update = getattr(nd, f'preloaded_{kind}', None) or getattr(nd, f'lars_{kind}')
        for group in bucket.groups(self.group_size):
            tensors = bucket.tensors[group]
            update(
                *(a for t in tensors for a in t.arrays),
                rates[group],
                bucket.decays[group],
                out=[t.weight for t in tensors],
                num_weights=len(tensors),
                momentum=momentum,
                rescale_grad=rescale,
            )


def scale_velocities(arrays: dict[str, np.ndarray], factor: float) -> None:
    """Multiply the velocities among the arrays of a checkpoint, as SGD requires for another
    learning rate."""
    for name in arrays:
        if name.startswith('optimizer/velocity/'):
            arrays[name] = arrays[name] * np.float32(factor)


def _sums_of_squares(arrays: Sequence[NDArray]) -> NDArray:
    """Return the sum of squares of each array; float32, shape (arrays,)."""
    if arrays[0].context.device_type == 'gpu':
        return nd.multi_sum_sq(*arrays, num_arrays=len(arrays))
    # On a CPU, it squares in float16 and adds one by one, which is wrong for large tensors;
    # products of rows, of up to 4,608 values in the networks, are exact to 1e-5.
    rows = [a.astype('float32', copy=False).reshape((a.shape[0], 1, -1)) for a in arrays]
    return nd.concat(*(nd.batch_dot(r, r, transpose_b=True).sum() for r in rows), dim=0)


def _move_to_flat(params: Sequence[Parameter]) -> Flat:
    """Move parameters into flat arrays, of which they become views; their gradients remain where
    they are."""
    ordered = sorted(params, key=lambda p: np.dtype(p.dtype) != np.float16)
    ends = [0, *accumulate(-(-p.data().size // _ALIGNMENT) * _ALIGNMENT for p in ordered)]
    num_half = ends[sum(np.dtype(p.dtype) == np.float16 for p in ordered)]
    context = ordered[0].data().context
    state = nd.zeros((2, ends[-1]), context)
    half = nd.zeros((num_half,), context, 'float16')
    flat = Flat(state, half, {p.name: start for p, start in zip(ordered, ends)})
    for param in ordered:
        weight, grad = param.data(), param.grad()
        view = flat.view(half if weight.dtype == np.float16 else state[1], param)
        view[:] = weight
        param._data = [view]
        autograd.mark_variables([view], [grad], param.grad_req)
    return flat


def _make_tensors(
    params: Sequence[tuple[str, Parameter]], config: OptimizerConfig, flat: Flat | None
) -> list[Tensor]:
    def make_state(row: int, param: Parameter) -> NDArray:
        if flat:
            return flat.view(flat.state[row], param)
        return nd.zeros(param.shape, param.data().context)

    tensors, last_layer = [], params[0][0].rpartition('_')[0]
    for name, param in params:
        layer, _, kind = name.rpartition('_')
        weight, master = param.data(), None
        if weight.dtype == np.float16:
            master = make_state(1, param)
            master[:] = weight.astype('float32')
        has_decay = kind == 'weight' or config.decay_bn_and_bias
        tensors.append(
            Tensor(
                name,
                weight=weight,
                grad=param.grad(),
                velocity=make_state(0, param),
                master=master,
                decay=config.weight_decay if has_decay else 0.0,
                lr_factor=config.last_layer_lr_factor if layer == last_layer else 1.0,
            )
        )
    return tensors


def cut_buckets(
    num_bytes: Sequence[int], kinds: Sequence[str], num_buckets: int
) -> list[list[int]]:
    """Return each bucket's tensor indices. Each dtype has its share of num_buckets by size, at
    least one. Pure."""
    buckets: list[list[int]] = []
    for indices in grouped(range(len(kinds)), kinds.__getitem__).values():
        sizes = [num_bytes[i] for i in indices]
        num_parts = max(1, num_buckets * sum(sizes) // sum(num_bytes))
        # A tensor is in the part that contains its first byte.
        starts = accumulate(sizes, initial=0)
        part_of = {i: num_parts * start // sum(sizes) for i, start in zip(indices, starts)}
        buckets += grouped(indices, part_of.__getitem__).values()
    return sorted(buckets, key=max)  # the order in which the backward pass completes them
