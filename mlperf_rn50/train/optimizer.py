"""SGD with momentum and LARS over all parameters, on MXNet's fused update operators.

mx.optimizer.LARS is not used: it corrects the momentum for the first few tensors of a step only.
Source: LARS, You et al. 2017 (https://arxiv.org/abs/1708.03888), with the momentum scaled by lr_now /
lr_previous as in Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, section 3).
"""
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mxnet as mx
import numpy as np

from mlperf_rn50.train.options import OptimizerConfig

# Most arrays that one call of multi_all_finite takes; it does not look.
_MOST_CHECKED = 200


@dataclass(frozen=True)
class Tensor:
    """A trained tensor with all that its update needs, the live arrays.

    Args:
        weight: float32 or float16.
        grad: of the weight's shape and dtype.
        velocity: float32, of the weight's shape.
        master: float32 copy of a float16 weight, else None.
    """

    name: str
    weight: mx.nd.NDArray
    grad: mx.nd.NDArray
    velocity: mx.nd.NDArray
    master: mx.nd.NDArray | None
    decay: float

    @property
    def is_adapted(self) -> bool:
        """Whether LARS gives it a rate of its own."""
        return self.name.endswith('_weight')

    @property
    def arrays(self) -> list[mx.nd.NDArray]:
        """What an update operator takes, in its order."""
        return [a for a in (self.weight, self.grad, self.velocity, self.master) if a is not None]


def group_size(device_type: str, name: str) -> int:
    """Most tensors in one call of an update operator; 1 for those of a single tensor. Pure.

    On a CPU the operators of several walk all tensors in step, so calls with many tensors, or with tensors of unlike
    sizes, are slow: 60 at once take 3.5 times as long as 4 of like size, and SGD is fastest tensor by tensor. On a GPU
    it is the number of calls that costs; MXNet takes 60 tensors a call, and MLPerf's submissions gave it 54.
    """
    return 54 if device_type == 'gpu' else {'sgd': 1, 'lars': 4}[name]


class Bucket:
    """Tensors whose gradients travel together, all of one dtype."""

    def __init__(self, tensors: Sequence[Tensor]):
        # Weights first, as the LARS operators want them, then neighbours of like size.
        self.tensors = sorted(tensors, key=lambda t: (not t.is_adapted, -t.weight.size, t.name))
        self.grads = [t.grad for t in self.tensors]
        self.num_adapted = sum(t.is_adapted for t in self.tensors)
        context = self.tensors[0].weight.context
        self.decays = mx.nd.array([t.decay for t in self.tensors], context)
        self.ones = mx.nd.ones_like(self.decays)
        # What an update changes; float16 weights follow their masters.
        self.is_mixed = self.tensors[0].master is not None
        self._changed = [[t.velocity for t in self.tensors],
                         [t.weight if t.master is None else t.master for t in self.tensors]]

    def groups(self, size: int) -> list[slice]:
        """Stretches of at most so many tensors."""
        return [slice(i, min(i + size, len(self.tensors))) for i in range(0, len(self.tensors), size)]

    def state(self) -> list[mx.nd.NDArray]:
        """A copy of what an update changes: joined, so that it takes few calls, whatever the number of tensors."""
        return [_join(arrays) for arrays in self._changed]

    def keep_if(self, condition: mx.nd.NDArray, before: Sequence[mx.nd.NDArray]) -> None:
        """Leaves all as it is where the condition, (1,), is 1, and as it was before where it is 0."""
        for arrays, now, old in zip(self._changed, self.state(), before):
            kept = mx.nd.where(condition, now.reshape((1, -1)), old.reshape((1, -1))).reshape((-1,))
            _split(kept, arrays)
        if self.is_mixed:
            _split(kept.astype('float16'), [t.weight for t in self.tensors])


class Optimizer:
    """Updates parameters in place.

    Velocity and update are those of MXNet's sgd_mom_update: v = m v - lr (g + wd w), w = w + v; for LARS
    lr is the tensor's own. Nesterov's are those of its nag_mom_update: w = w + m v - lr (g + wd w), and the v that is
    kept decays by the new w. A step of which only a fraction is filled takes that fraction of lr, so every image
    moves the weights alike; what earlier images left in v moves them in full.
    """

    def __init__(self, params: Mapping[str, mx.gluon.Parameter], config: OptimizerConfig, num_buckets: int = 1):
        """Params by name, initialised, in the order of the forward pass; backward yields their gradients reversed."""
        self._config = config
        self.tensors = [_make_tensor(n, p, config) for n, p in reversed(list(params.items()))]
        cuts = cut_buckets([t.weight.size * np.dtype(t.weight.dtype).itemsize for t in self.tensors],
                           [np.dtype(t.weight.dtype).name for t in self.tensors], num_buckets)
        self.buckets = [Bucket([self.tensors[i] for i in cut]) for cut in cuts]
        self.group_size = group_size(self.tensors[0].weight.context.device_type, config.name)
        self.last_lr: float | None = None
        self.is_batch_new = False
        self._applied: list[tuple[Bucket, mx.nd.NDArray, float]] = []

    def state(self) -> dict[str, mx.nd.NDArray]:
        """Every array a resumed run needs, by name; they are the live ones."""
        arrays = {f'velocity/{t.name}': t.velocity for t in self.tensors}
        arrays.update({f'master/{t.name}': t.master for t in self.tensors if t.master is not None})
        return arrays

    def reset_masters(self) -> None:
        """Takes over float16 weights that were set from outside."""
        for tensor in self.tensors:
            if tensor.master is not None:
                tensor.master[:] = tensor.weight.astype('float32')

    def step(self, lr: float, fraction: float = 1.0, rescale: float = 1.0,
             is_finite: mx.nd.NDArray | None = None) -> None:
        """One update from the gradients as they stand, each bucket as soon as its gradients are there.

        Args:
            lr: learning rate of the schedule, for the whole network.
            fraction: of the global batch that is filled, above 0, up to 1.
            rescale: what gradients are multiplied with to be those of the mean loss.
            is_finite: (1,), 0 where the step must change nothing; None where it cannot be.
        """
        momentum = self._momentum(lr)
        update = (self._update_with_nesterov if self._config.nesterov else
                  self._update_with_one_rate if self._config.name == 'sgd' else self._update_with_rates)
        self._applied.clear()
        for bucket in self.buckets:
            before = bucket.state() if is_finite is not None else None
            update(bucket, lr * fraction, momentum, rescale)
            if before is not None:
                bucket.keep_if(is_finite, before)
        self.last_lr, self.is_batch_new = lr, False

    def _momentum(self, lr: float) -> float:
        """The momentum of a step: LARS follows every change of the learning rate, SGD one that a new batch made."""
        is_corrected = self.last_lr and (self._config.name == 'lars' or self.is_batch_new)
        return self._config.momentum * (lr / self.last_lr if is_corrected and self.last_lr else 1.0)

    def all_finite(self) -> mx.nd.NDArray:
        """(1,): 1 where every gradient is a number, 0 where one overflowed."""
        result = mx.nd.ones((1,), self.tensors[0].weight.context)
        for bucket in self.buckets:
            for group in bucket.groups(_MOST_CHECKED):
                grads = bucket.grads[group]
                mx.nd.multi_all_finite(*grads, num_arrays=len(grads), init_output=False, out=result)
        return result

    def squared_norms(self) -> mx.nd.NDArray:
        """(tensors,): the sum of squares of every gradient as it stands, bucket after bucket."""
        return mx.nd.concat(*(mx.nd.multi_sum_sq(*b.grads, num_arrays=len(b.grads)) for b in self.buckets), dim=0)

    def trust_ratios(self) -> list[tuple[list[str], mx.nd.NDArray]]:
        """LARS: names of tensors with what the last step multiplied its learning rate with for them, (names,)."""
        return [([t.name for t in b.tensors[:b.num_adapted]], rates[:b.num_adapted] / lr)
                for b, rates, lr in self._applied if b.num_adapted]

    def _update_with_nesterov(self, bucket: Bucket, lr: float, momentum: float, rescale: float) -> None:
        """SGD with Nesterov's momentum, for which MXNet has no operator of several tensors."""
        update = mx.nd.mp_nag_mom_update if bucket.is_mixed else mx.nd.nag_mom_update
        usual = self._config.momentum
        for tensor in bucket.tensors:
            if momentum != usual:  # what was kept follows the rate, and not the step that looks ahead
                tensor.velocity[:] = tensor.velocity * (momentum / usual)
            update(*tensor.arrays, out=tensor.weight, lr=lr, wd=tensor.decay, momentum=usual, rescale_grad=rescale)

    def _update_with_one_rate(self, bucket: Bucket, lr: float, momentum: float, rescale: float) -> None:
        """SGD: groups of tensors, or tensor by tensor; the rate is a plain number."""
        keys = {'momentum': momentum, 'rescale_grad': rescale}
        for group in bucket.groups(self.group_size):
            tensors = bucket.tensors[group]
            inputs = [a for t in tensors for a in t.arrays]
            if self.group_size == 1:
                update = mx.nd.mp_sgd_mom_update if bucket.is_mixed else mx.nd.sgd_mom_update
                update(*inputs, out=tensors[0].weight, lr=lr, wd=tensors[0].decay, lazy_update=False, **keys)
            else:
                update = mx.nd.multi_mp_sgd_mom_update if bucket.is_mixed else mx.nd.multi_sgd_mom_update
                update(*inputs, out=[t.weight for t in tensors], lrs=[lr] * len(tensors),
                       wds=[t.decay for t in tensors], num_weights=len(tensors), **keys)

    def _lars_rates(self, bucket: Bucket, lr: float, rescale: float) -> mx.nd.NDArray:
        """The rate of every tensor: lr, for the weights times eta |w| / (|g| + wd |w| + eps)."""
        n, rates = bucket.num_adapted, bucket.ones * lr
        if n:
            arrays = [t.weight for t in bucket.tensors[:n]], bucket.grads[:n]
            sums = [mx.nd.multi_sum_sq(*a, num_arrays=n) for a in arrays]
            mx.nd.multi_lars(rates[:n], *sums, bucket.decays[:n], eta=self._config.lars_eta,
                             eps=self._config.lars_epsilon, rescale_grad=rescale, out=rates[:n])
        return rates

    def _update_with_rates(self, bucket: Bucket, lr: float, momentum: float, rescale: float) -> None:
        """LARS: groups of tensors with their rates, which never leave the device."""
        rates = self._lars_rates(bucket, lr, rescale)
        self._applied.append((bucket, rates, lr))
        update = mx.nd.preloaded_multi_mp_sgd_mom_update if bucket.is_mixed else mx.nd.preloaded_multi_sgd_mom_update
        for group in bucket.groups(self.group_size):
            tensors = bucket.tensors[group]
            update(*(a for t in tensors for a in t.arrays), rates[group], bucket.decays[group],
                   out=[t.weight for t in tensors], num_weights=len(tensors), momentum=momentum, rescale_grad=rescale)


def _join(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Arrays of one dtype as a new one, (elements of all,)."""
    return mx.nd.concat(*(a.reshape((-1,)) for a in arrays), dim=0)


def _split(joined: mx.nd.NDArray, arrays: Sequence[mx.nd.NDArray]) -> None:
    """Puts back what _join made, into arrays of its dtype."""
    starts = [0, *accumulate(a.size for a in arrays)][:-1]
    # Not split_v2, which makes new arrays.
    mx.nd._internal._split_v2(joined, starts, axis=0, out=[a.reshape((-1,)) for a in arrays])


def _make_tensor(name: str, param: mx.gluon.Parameter, config: OptimizerConfig) -> Tensor:
    weight = param.data()
    is_decayed = name.endswith('_weight') or config.decay_bn_and_bias
    return Tensor(name, weight, param.grad(), mx.nd.zeros(weight.shape, weight.context),
                  weight.astype('float32') if weight.dtype == np.float16 else None,
                  config.weight_decay if is_decayed else 0.0)


def cut_buckets(num_bytes: Sequence[int], kinds: Sequence[str], num_buckets: int) -> list[list[int]]:
    """Cuts tensors into at most so many stretches of about equal size, and each of these by kind. Pure.

    Args:
        num_bytes: of each tensor, in the order their gradients come.
        kinds: dtype of each tensor: an exchange has one.

    Returns:
        The numbers of the tensors of each bucket; every tensor in one, none empty.
    """
    total, before, stretches = sum(num_bytes), 0, [0] * len(num_bytes)
    for i, n in enumerate(num_bytes):
        stretches[i] = math.floor(num_buckets * before / total)
        before += n
    keys = list(zip(stretches, kinds))
    return [[i for i, k in enumerate(keys) if k == key] for key in dict.fromkeys(keys)]
