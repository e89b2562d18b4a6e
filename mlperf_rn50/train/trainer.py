"""The network, its optimizer and the step that ties them to the ranks."""
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock

from mlperf_rn50 import npz
from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import Batch, device_context
from mlperf_rn50.model.fused import fusion_text, runs_nvidias_kernels
from mlperf_rn50.model.resnet import FoldedResNet
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.evaluate import correct_counts
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.plan import Plan
from mlperf_rn50.train.schedule import LossScale
from mlperf_rn50.train.step_timer import Pace


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


# What makes a GPU give the same bits again: deterministic algorithms, and the same ones each time. The search for the
# fastest times them, and may choose others in another process.
DETERMINISM = {'MXNET_ENFORCE_DETERMINISM': '1', 'MXNET_CUDNN_AUTOTUNE_DEFAULT': '0'}


def device_notes(config: Config, environ: Mapping[str, str]) -> list[str]:
    """What the log says of a run on a GPU: which operators the network uses, and whether its bits are reproducible."""
    if config.train.device == 'cpu':
        return []
    notes = [fusion_text(config, environ)] if config.model.name.startswith('resnet') else []
    if missing := [f'{name}={value}' for name, value in DETERMINISM.items() if environ.get(name) != value]:
        notes.append('resumed or repeated, this run is not promised to give the same bits; on a GPU that takes '
                     f'{" and ".join(missing)}')
    return notes


@dataclass(frozen=True)
class Norms:
    """Sizes of a step's gradients, on their way; squared: float32, (tensors,): their sums of squares."""

    rescale: float
    squared: mx.nd.NDArray
    trust_ratios: list[tuple[list[str], mx.nd.NDArray]]


@dataclass(frozen=True)
class PendingStep:
    """What a step will have found once it is done; nothing waits for it.

    Args:
        sums: float32, (2,): the mean loss of the global batch, and how many ranks were asked to stop.
        is_finite: float32, (1,): whether no gradient overflowed; None where they are not float16.
    """

    sums: mx.nd.NDArray
    loss_scale: float
    is_finite: mx.nd.NDArray | None
    norms: Norms | None


class Trainer:
    """One rank's part of the training.

    The loss of a rank is the mean over its full batch, whatever the number of ranks, so that float16 gradients do not
    shrink with the global batch; padding weighs nothing. The update divides the sum over ranks by what is missing to
    the mean over the images of the step.
    """

    def __init__(self, plan: Plan, comm: Comm, seed: int, device_id: int | None,
                 computed: Callable[[bool], None] = lambda is_exchanging: None):
        """computed: see Pace."""
        config = plan.config
        self._plan, self._comm = plan, comm
        self.context = device_context(device_id)
        self.net = build_model(config, self.context, seed)
        self._folded = FoldedResNet(config, self.context) if config.model.name.startswith('resnet') else None
        self._loss = SmoothedCrossEntropy(config.train.label_smoothing)
        self._loss.hybridize(static_alloc=True, static_shape=True)
        params = self.net.collect_params()
        trained = {n: p for n, p in params.items() if p.grad_req != 'null'}
        self._statistics = {n: p.data() for n, p in sorted(params.items()) if p.grad_req == 'null'}
        self._num_micro = config.train.gradient_accumulation_steps
        # Gradients that a pass writes where it should add, with their sums.
        self._by_hand: list[tuple[mx.nd.NDArray, mx.nd.NDArray]] = []
        if self._num_micro > 1:
            is_by_hand = runs_nvidias_kernels(config)
            for name, p in trained.items():
                if is_by_hand and name.endswith(('_gamma', '_beta')):
                    self._by_hand.append((p.grad(), mx.nd.zeros_like(p.grad())))
                else:
                    p.grad_req = 'add'
        self._is_float16 = config.train.precision == 'float16'
        self.loss_scale = LossScale(config.train.loss_scale if self._is_float16 else 1.0)
        self.optimizer = Optimizer(trained, config.optimizer, config.comm.num_buckets)
        self._positions = mx.nd.arange(plan.local_batch_size, ctx=self.context)
        self.pace = Pace(computed)
        self._num_bytes = self._num_new_bytes = 0

    @property
    def tensor_names(self) -> list[str]:
        """Names of the trained tensors, as weights_initialization logs them."""
        return sorted(t.name for t in self.optimizer.tensors)

    @property
    def eval_net(self) -> HybridBlock:
        """The network of evaluations: as it was at the last fold()."""
        return self._folded.net if self._folded else self.net

    def broadcast(self) -> None:
        """Gives every rank the weights, statistics and optimizer state of rank 0."""
        self._comm.broadcast(self._live_arrays())

    def step(self, batches: Iterator[Batch], step_in_epoch: int, lr: float, stop_requested: bool,
             with_norms: bool = False) -> PendingStep:
        """One optimizer step, of one of its batches per pass, pushed to the device and not waited for."""
        loss = 0.0
        for _ in range(self._num_micro):
            batch = next(batches)
            self.pace.has_data()
            self._num_bytes += batch.num_bytes
            self._num_new_bytes += batch.num_new_bytes
            losses = self.forward(batch)
            losses.backward()
            for grad, total in self._by_hand:
                total += grad
            loss = losses.detach().sum() + loss
        for grad, total in self._by_hand:
            grad[:] = total
            total[:] = 0
        sums = self.exchange(loss, step_in_epoch, stop_requested)
        return self.update(sums, step_in_epoch, lr, with_norms)

    def take_bytes(self) -> tuple[int, int]:
        """Bytes of the records of all steps since the last call, and of those that are new to this rank's node."""
        taken = self._num_bytes, self._num_new_bytes
        self._num_bytes = self._num_new_bytes = 0
        return taken

    def forward(self, batch: Batch) -> mx.nd.NDArray:
        """The weighted losses of a batch's images, ready for backward(); float32 (local batch,)."""
        with autograd.record():
            return self._loss(self.net(batch.images), batch.labels, self._loss_weights(batch.num_valid))

    def exchange(self, loss: mx.nd.NDArray, step_in_epoch: int, stop_requested: bool) -> mx.nd.NDArray:
        """Sums gradients, and what Pulse.sums holds, over the ranks. loss: this rank's, (1,)."""
        last = self.optimizer.tensors[-1].grad
        computed = last.copy()
        # The pulse goes first: it is ready before the gradients are.
        mean = loss * self._rescale(step_in_epoch)
        sums = mx.nd.concat(mean, mx.nd.full((1,), float(stop_requested), self.context), dim=0)
        sums = self._comm.sum_in_background(sums)
        for number, bucket in enumerate(self.optimizer.buckets):
            self._comm.sum_gradients(bucket.grads, number)
        self.pace.stepped(computed, last.copy())
        return sums

    def update(self, sums: mx.nd.NDArray, step_in_epoch: int, lr: float, with_norms: bool = False) -> PendingStep:
        """Applies the gradients, bucket after bucket as they come."""
        used, rescale = self.loss_scale.value, self._rescale(step_in_epoch)
        is_finite = self.optimizer.all_finite() if self._is_float16 else None
        self.optimizer.step(lr, self._plan.fraction(step_in_epoch), rescale, is_finite)
        norms = Norms(rescale, self.optimizer.squared_norms(), self.optimizer.trust_ratios()) if with_norms else None
        if self._num_micro > 1:
            for tensor in self.optimizer.tensors:
                tensor.grad[:] = 0
        return PendingStep(sums, used, is_finite, norms)

    def _loss_weights(self, num_valid: int) -> mx.nd.NDArray:
        """The weight of each image of a batch in this rank's loss, float32, (local batch,)."""
        return (self._positions < num_valid) * (self.loss_scale.value * self._plan.loss_weight)

    def _rescale(self, step_in_epoch: int) -> float:
        return self._plan.rescale(step_in_epoch) / self.loss_scale.value

    def read(self, pulse: PendingStep) -> tuple[float, bool]:
        """Waits for a step, and raises its MXNetError: its mean loss, and whether any rank was asked to stop."""
        loss, num_asked = (float(v) for v in pulse.sums.asnumpy())
        self.pace.check()
        if pulse.is_finite is not None:
            self.loss_scale.read(pulse.loss_scale, bool(pulse.is_finite.asscalar()))
        return loss, num_asked > 0

    def average_statistics(self) -> None:
        """Averages BatchNorm's running statistics over ranks, in place.

        Statistics are linear in what they have seen, so averaging them early or late gives the same average.
        """
        self.settle()
        if self._statistics:
            self._comm.average(list(self._statistics.values()))

    def fold(self) -> None:
        """Gives eval_net the network as it is."""
        if self._folded:
            self._folded.copy_weights(self.net)

    def settle(self) -> None:
        """Waits for every step pushed so far.

        Reading one array is not enough: a static graph updates the running statistics, and keeps weights in
        oneDNN's layout, without the array's own dependencies knowing, so a read may come too early.
        """
        mx.nd.waitall()
        self.pace.drain()

    def _live_arrays(self) -> dict[str, mx.nd.NDArray]:
        """What all ranks share, by name in a checkpoint."""
        weights = {t.name: t.weight for t in self.optimizer.tensors}
        return {**{f'model/{n}': a for n, a in {**weights, **self._statistics}.items()},
                **{f'optimizer/{n}': a for n, a in self.optimizer.state().items()}}

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what snapshot returns."""
        return {n: a.shape for n, a in self._live_arrays().items()}

    def snapshot(self) -> dict[str, np.ndarray]:
        """A copy of everything a checkpoint holds, as it stands: on all ranks the same after average_statistics."""
        self.settle()
        return {n: a.asnumpy() for n, a in self._live_arrays().items()}

    def copy_network(self) -> dict[str, mx.nd.NDArray]:
        """A copy of the network's own arrays on the device, by parameter."""
        return {n: p.data().copy() for n, p in self.net.collect_params().items()}

    def digests(self) -> dict[str, int]:
        """CRC-32 of every array of a snapshot, by name."""
        return {n: zlib.crc32(a.asnumpy().view(np.uint8).ravel()) for n, a in self._live_arrays().items()}

    def find_non_finite(self) -> str | None:
        """Return the name of the first array of a snapshot that holds a NaN or an infinity."""
        return next((n for n, a in self._live_arrays().items() if npz.find_non_finite({n: a.asnumpy()})), None)

    def restore(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        """Goes back to a snapshot. Rank 0 has it; the other ranks pass None and receive it."""
        self.settle()
        if arrays is not None:
            self._set(arrays)
        self.broadcast()

    def _set(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in self._live_arrays().items():
            # By way of MXNet's own copy: an array that a graph has used may be in oneDNN's layout.
            mx.nd.array(arrays[name], self.context, array.dtype).copyto(array)

    def warm_up(self, batches: Iterator[Batch], eval_batch: Batch, num_steps: int) -> None:
        """Some steps, perhaps none, and an evaluation on made-up images, then everything as it was before.

        They compile graphs, choose kernels, allocate memory and open the connections of the exchange. Batches are
        filled up, so these shapes are all that a run comes to.
        """
        if not num_steps:
            return
        before, scale = self.snapshot(), self.loss_scale
        self.loss_scale = LossScale(scale.value)
        for _ in range(num_steps):
            self.read(self.step(batches, 0, 1e-3, False))
        self.average_statistics()
        self.fold()
        logits = self.eval_net(eval_batch.images)
        correct_counts(logits, eval_batch.labels, eval_batch.num_valid).wait_to_read()
        self.settle()
        self._set(before)
        self.settle()
        self.loss_scale, self.optimizer.last_lr = scale, None
        self.pace.take()
