"""The network, its optimizer and the step that ties them to the ranks."""
from collections.abc import Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock

from mlperf_rn50.data.pipeline import Batch, device_context
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.comm import Comm
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.plan import Plan


class SmoothedCrossEntropy(HybridBlock):
    """Cross entropy of each image, times its weight; the target gives `smoothing` evenly to all classes."""

    def __init__(self, smoothing: float):
        super().__init__()
        self._smoothing = smoothing

    def hybrid_forward(self, F, logits, labels, weights):
        log_p = F.log_softmax(logits, axis=-1)
        loss = -F.pick(log_p, labels, axis=-1)
        if self._smoothing:
            loss = (1 - self._smoothing) * loss - self._smoothing * F.mean(log_p, axis=-1)
        return loss * weights


class Trainer:
    """One rank's part of the training.

    The gradients of all ranks are sums over images of weighted losses, the weights of a global batch adding
    up to 1: so their sum over ranks is the gradient of the batch's mean loss, padding weighs nothing, and
    the split over ranks and passes does not matter.
    """

    def __init__(self, plan: Plan, comm: Comm, seed: int, device_id: int | None):
        config = plan.config
        self._comm, self._shard = comm, plan.train_shard(comm.rank)
        self._context = device_context(device_id)
        self.net = build_model(config, self._context, seed)
        self._loss = SmoothedCrossEntropy(config.train.label_smoothing)
        self._loss.hybridize(static_alloc=True, static_shape=True)
        params = self.net.collect_params()
        trained = {n: p for n, p in params.items() if p.grad_req != 'null'}
        self._statistics = {n: p.data() for n, p in sorted(params.items()) if p.grad_req == 'null'}
        self.num_micro = self._shard.num_micro
        if self.num_micro > 1:
            for p in trained.values():
                p.grad_req = 'add'
        self._loss_scale = config.train.loss_scale if config.train.precision == 'float16' else 1.0
        self.optimizer = Optimizer(trained, config.optimizer, self._loss_scale)
        self._weights = {n: trained[n].data() for n in self.optimizer.names}
        self._grads = [trained[n].grad() for n in self.optimizer.names]
        self._positions = mx.nd.arange(plan.local_batch_size, ctx=self._context)

    @property
    def tensor_names(self) -> list[str]:
        """Names of the trained tensors, as weights_initialization logs them."""
        return sorted(self._weights)

    def broadcast(self) -> None:
        """Gives every rank the weights, statistics and optimizer state of rank 0."""
        self._comm.broadcast(self._live_arrays())

    def step(self, batches: Iterator[Batch], step_in_epoch: int, lr: float, stop_requested: bool) -> mx.nd.NDArray:
        """One optimizer step, pushed to the device and not waited for.

        Args:
            batches: of this rank; one is taken per pass.
            step_in_epoch: from 0.
            lr: learning rate of this step.
            stop_requested: whether this rank was asked to stop.

        Returns:
            float32 (2,): the mean loss of the global batch, and how many ranks were asked to stop.
        """
        loss = 0.0
        for _ in range(self.num_micro):
            losses = self.forward(next(batches), step_in_epoch)
            losses.backward()
            loss = losses.detach().sum() + loss
        pulse = self.exchange(loss, stop_requested)
        self.update(lr)
        return pulse

    def forward(self, batch: Batch, step_in_epoch: int) -> mx.nd.NDArray:
        """The weighted losses of a batch's images, ready for backward(); float32 (local batch,)."""
        weights = self._loss_weights(batch.num_valid, self._shard.num_valid_global(step_in_epoch))
        with autograd.record():
            return self._loss(self.net(batch.images), batch.labels, weights)

    def exchange(self, loss: mx.nd.NDArray, stop_requested: bool) -> mx.nd.NDArray:
        """Sums gradients, and what step() returns, over the ranks. loss: this rank's, (1,)."""
        # The pulse goes first: it is ready before the gradients are.
        pulse = mx.nd.concat(loss / self._loss_scale, mx.nd.full((1,), float(stop_requested), self._context), dim=0)
        pulse = self._comm.sum_in_background(pulse)
        self._comm.sum_gradients(self._grads)
        return pulse

    def update(self, lr: float) -> None:
        """Applies the gradients."""
        self.optimizer.step(lr)
        if self.num_micro > 1:
            for grad in self._grads:
                grad[:] = 0

    def _loss_weights(self, num_valid: int, num_valid_global: int) -> mx.nd.NDArray:
        return (self._positions < num_valid) * (self._loss_scale / num_valid_global)

    def average_statistics(self) -> None:
        """Averages BatchNorm's running statistics over ranks, in place."""
        self.settle()
        if self._statistics:
            self._comm.average(list(self._statistics.values()))

    def settle(self) -> None:
        """Waits for every step pushed so far.

        Reading one array is not enough: a static graph updates the running statistics, and keeps weights in
        oneDNN's layout, without the array's own dependencies knowing, so a read may come too early.
        """
        mx.nd.waitall()

    def _live_arrays(self) -> dict[str, mx.nd.NDArray]:
        """What all ranks share, by name in a checkpoint."""
        return {**{f'model/{n}': a for n, a in {**self._weights, **self._statistics}.items()},
                **{f'optimizer/{n}': a for n, a in self.optimizer.state().items()}}

    def array_shapes(self, num_ranks: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what snapshot returns when there are so many ranks."""
        shapes = {n: a.shape for n, a in self._live_arrays().items()}
        size = sum(a.size for a in self._statistics.values())
        return {**shapes, 'statistics_of_ranks': (num_ranks, size)} if size else shapes

    def snapshot(self) -> dict[str, np.ndarray]:
        """Everything a checkpoint holds; called by all ranks, complete on each. Changes nothing.

        model/ has the running statistics averaged over ranks, statistics_of_ranks each rank's own.
        """
        self.settle()
        arrays = {n: a.asnumpy() for n, a in self._live_arrays().items()}
        if not self._statistics:
            return arrays
        own = np.concatenate([a.asnumpy().ravel() for a in self._statistics.values()])
        rows = self._comm.gather(own)
        averaged = rows.mean(axis=0, dtype=np.float64).astype(own.dtype)
        arrays.update({f'model/{n}': a for n, a in self._cut(averaged).items()})
        return {**arrays, 'statistics_of_ranks': rows}

    def restore(self, arrays: dict[str, np.ndarray] | None) -> None:
        """Goes back to a snapshot. Rank 0 has it; the other ranks pass None and receive it.

        A snapshot of another number of ranks has no statistics of their own for these: all take the average.
        """
        self.settle()
        if arrays is not None:
            for name, array in self._live_arrays().items():
                array[:] = arrays[name]
        self.broadcast()
        if self._statistics:
            self._restore_statistics(arrays)

    def _restore_statistics(self, arrays: dict[str, np.ndarray] | None) -> None:
        rows = mx.nd.zeros(self.array_shapes(self._comm.world_size)['statistics_of_ranks'])
        if arrays is not None:
            own = arrays['statistics_of_ranks']
            average = np.concatenate([arrays[f'model/{n}'].ravel() for n in self._statistics])
            rows[:] = own if own.shape == rows.shape else np.broadcast_to(average, rows.shape)
        self._comm.broadcast({'statistics_of_ranks': rows})
        for name, values in self._cut(rows[self._comm.rank].asnumpy()).items():
            self._statistics[name][:] = values

    def _cut(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """A rank's running statistics by name, from one row of statistics_of_ranks."""
        ends = np.cumsum([a.size for a in self._statistics.values()])
        return {n: part.reshape(a.shape)
                for (n, a), part in zip(self._statistics.items(), np.split(flat, ends[:-1]))}
