"""SGD with momentum and LARS over all parameters, on MXNet's fused update operators.

mx.optimizer.LARS is not used: it corrects the momentum for the first few tensors of a step only.
Source: LARS, You et al. 2017 (https://arxiv.org/abs/1708.03888), with the momentum scaled by lr_now /
lr_previous as in Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, section 3).
"""
from collections.abc import Mapping

import mxnet as mx
import numpy as np

from mlperf_rn50.config import OptimizerConfig

# Tensors in one call of a multi-tensor operator. They walk all tensors in step, so calls with many tensors,
# or with tensors of unlike sizes, are slow on a CPU: 60 at once take 3.5 times as long as 4 of like size.
_GROUP_SIZE = 4


class Optimizer:
    """Updates parameters in place.

    Velocity and update are those of MXNet's sgd_mom_update: v = m v - lr (g + wd w), w = w + v; for LARS
    lr is the tensor's own.
    """

    def __init__(self, params: Mapping[str, mx.gluon.Parameter], config: OptimizerConfig, grad_scale: float = 1.0):
        """Params by name, initialised; grad_scale is what their gradients were multiplied with (loss scale)."""
        # Weights first, as the LARS operators want them, then neighbours of one dtype and like size.
        def order(name: str) -> tuple:
            p = params[name]
            return not name.endswith('_weight'), np.dtype(p.dtype) != np.float16, -int(np.prod(p.shape)), name
        self.names = sorted(params, key=order)
        self._config, self._rescale = config, 1.0 / grad_scale
        weights = [params[n].data() for n in self.names]
        self._weights, self._grads = weights, [params[n].grad() for n in self.names]
        self._num_weights = sum(n.endswith('_weight') for n in self.names)
        self._decays = [config.weight_decay if n.endswith('_weight') or config.decay_bn_and_bias else 0.0
                        for n in self.names]
        self._decay = mx.nd.array(self._decays, weights[0].context)
        self._ones = mx.nd.ones_like(self._decay)
        is_mixed = [w.dtype == np.float16 for w in weights]
        self._groups = _groups_of(is_mixed)
        self._velocity = [mx.nd.zeros(w.shape, w.context) for w in weights]
        self._masters = [w.astype('float32') if m else None for w, m in zip(weights, is_mixed)]
        self.last_lr: float | None = None

    def state(self) -> dict[str, mx.nd.NDArray]:
        """Every array a resumed run needs, by name; they are the live ones."""
        arrays = {f'velocity/{n}': v for n, v in zip(self.names, self._velocity)}
        arrays.update({f'master/{n}': m for n, m in zip(self.names, self._masters) if m is not None})
        return arrays

    def step(self, lr: float) -> None:
        """One update from the gradients as they stand, with a learning rate for the whole network."""
        momentum = self._config.momentum
        if self._config.name == 'sgd':
            self._update_with_one_rate(lr, momentum)
        else:
            if self.last_lr:
                momentum *= lr / self.last_lr
            self._update_with_rates(self._lars_rates(lr), momentum)
        self.last_lr = lr

    def _update_with_one_rate(self, lr: float, momentum: float) -> None:
        """SGD: tensor by tensor, which is fastest where the rate is a plain number."""
        keys = {'lr': lr, 'momentum': momentum, 'rescale_grad': self._rescale, 'lazy_update': False}
        for w, g, v, master, wd in zip(self._weights, self._grads, self._velocity, self._masters, self._decays):
            if master is None:
                mx.nd.sgd_mom_update(w, g, v, out=w, wd=wd, **keys)
            else:
                mx.nd.mp_sgd_mom_update(w, g, v, master, out=w, wd=wd, **keys)

    def _lars_rates(self, lr: float) -> mx.nd.NDArray:
        """The rate of every tensor: lr, for the weights times eta |w| / (|g| + wd |w| + eps)."""
        n, rates = self._num_weights, self._ones * lr
        sums = [mx.nd.multi_sum_sq(*arrays, num_arrays=n) for arrays in (self._weights[:n], self._grads[:n])]
        mx.nd.multi_lars(rates[:n], *sums, self._decay[:n], eta=self._config.lars_eta, eps=self._config.lars_epsilon,
                         rescale_grad=self._rescale, out=rates[:n])
        return rates

    def _update_with_rates(self, lrs: mx.nd.NDArray, momentum: float) -> None:
        """LARS: groups of tensors with their rates, which never leave the device."""
        for group in self._groups:
            rows = [(self._weights[i], self._grads[i], self._velocity[i], self._masters[i]) for i in group]
            inputs = [a for row in rows for a in row if a is not None]
            is_mixed = rows[0][3] is not None
            update = mx.nd.preloaded_multi_mp_sgd_mom_update if is_mixed else mx.nd.preloaded_multi_sgd_mom_update
            update(*inputs, lrs[group.start:group.stop], self._decay[group.start:group.stop],
                   out=[row[0] for row in rows], num_weights=len(rows), momentum=momentum, rescale_grad=self._rescale)


def _groups_of(kinds: list[bool]) -> list[range]:
    """Cuts range(len(kinds)) into groups of at most _GROUP_SIZE neighbours of one kind."""
    groups, start = [], 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start] or i - start == _GROUP_SIZE:
            groups.append(range(start, i))
            start = i
    return groups
