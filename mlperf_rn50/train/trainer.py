"""Training step of a rank: network, optimizer and gradient exchange."""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mxnet import autograd, nd
from mxnet.ndarray import NDArray

from mlperf_rn50 import npz
from mlperf_rn50.config import image_shape, with_size
from mlperf_rn50.data.batches import Batch, device_context
from mlperf_rn50.model.fused import runs_nvidias_kernels
from mlperf_rn50.model.resnet import FoldedResNet
from mlperf_rn50.model.training import MovingAverage, SmoothedCrossEntropy
from mlperf_rn50.model.zoo import build_for_sizes, build_model, variance_corrections
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.train.checkpoint.progress import TrainerState
from mlperf_rn50.train.comm.horovod import Comm, wait_for
from mlperf_rn50.train.comm.rank_checks import device_digests
from mlperf_rn50.train.comm.step_timer import StepTimer
from mlperf_rn50.train.evaluate import Forward, correct_counts, with_mirror
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.plan import Plan
from mlperf_rn50.train.schedule import LossScale

# Passes of a step that Python gives to the device before it waits for an earlier one. With no
# limit, the batches of all passes would be in memory, and the run would show no sign of life.
_PASSES_AHEAD = 2


@dataclass(frozen=True)
class Norms:
    """Gradient norms of a step, not yet computed; squared: sum of squares per tensor, float32,
    (tensors,)."""

    rescale: float
    squared: NDArray
    trust_ratios: list[tuple[list[str], NDArray]]

    def gradient_norm(self) -> float:
        """Return the gradient norm of the mean loss."""
        return self.rescale * math.sqrt(float(self.squared.asnumpy().sum()))

    def ratios(self) -> dict[str, float]:
        """Return LARS's trust ratio for each tensor."""
        ratios: dict[str, float] = {}
        for names, values in self.trust_ratios:
            ratios |= dict(zip(names, values.asnumpy().tolist()))
        return ratios


class Flags(NamedTuple):
    """Requests of a rank, or after an exchange those of any rank."""

    stop: bool = False
    checkpoint: bool = False
    trace: bool = False

    def __or__(self, other: 'Flags') -> 'Flags':
        return Flags(*map(max, self, other))


NO_FLAGS = Flags()


@dataclass(frozen=True)
class PendingStep:
    """Results of a step, not yet computed. sums: result of exchange(); is_finite: (1,), if it may
    be skipped."""

    sums: NDArray
    learning_rate: float  # the one applied
    loss_scale: float
    is_finite: NDArray | None
    norms: Norms | None


class Trainer:
    """Training on one rank.

    The loss of a rank is the mean over its full batch, so that float16 gradients do not shrink when
    the global batch grows; padding has weight 0. The update rescales the mean over ranks to the
    mean over the images of the step.

    seed: None if load_state follows. can_skip: whether a step that overflows is skipped.
    statistics: running statistics of BatchNorm. folded: network for evaluations, with BatchNorm
    folded into its convolutions.
    """

    def __init__(
        self,
        plan: Plan,
        comm: Comm,
        seed: int | None,
        device_id: int | None,
        on_exchange: Callable[[bool], None] = lambda is_exchanging: None,
        on_step: Callable[[StepSpans], None] = lambda spans: None,
        on_pass: Callable[[], None] = lambda: None,
    ):
        config, train = plan.config, plan.config.train
        self.plan = plan
        self.comm = comm
        self.context = device_context(device_id)

        # the networks, which share their parameters, and the loss
        self.net = build_model(config, self.context, seed)
        self.nets = build_for_sizes(config, self.net)
        self.folded = FoldedResNet(config, self.context) if config.model.is_resnet else None
        self._loss = SmoothedCrossEntropy(train.label_smoothing)
        self._loss.hybridize(static_alloc=True, static_shape=True)
        self._positions = nd.arange(plan.local_batch_size, ctx=self.context)

        # the parameters: trained ones, and running statistics
        params = self.net.collect_params()
        trained = {n: p for n, p in params.items() if p.grad_req != 'null'}
        self.statistics = {n: p.data() for n, p in sorted(params.items()) if p.grad_req == 'null'}
        # Factors N / (N - 1), which make running variances unbiased. MXNet's operators for CPUs
        # leave them out. Averages are linear, so each use of a variance applies its factor:
        # evaluations, checkpoints and saved networks have unbiased variances. With data.sizes, the
        # factor is that of the last size, which determines the statistics of the final network.
        last = config.data.size_of(len(config.data.sizes))
        shape = plan.local_batch_size, *image_shape(with_size(config, last))
        self._variance_factors: dict[str, float] = {}
        if device_id is None:
            self._variance_factors = variance_corrections(self.nets[last], shape)
        for name, factor in self._variance_factors.items():
            self.statistics[name] /= factor

        # Gradients of several passes. Those that each pass overwrites instead of accumulating are
        # summed in other arrays.
        self._num_micro = train.gradient_accumulation_steps
        self._manual_sums: list[tuple[NDArray, NDArray]] = []
        if self._num_micro > 1:
            is_overwriting = runs_nvidias_kernels(config)
            for name, p in trained.items():
                if is_overwriting and name.endswith(('_gamma', '_beta')):
                    self._manual_sums.append((p.grad(), nd.zeros_like(p.grad())))
                else:
                    p.grad_req = 'add'

        # the update, after the accumulation, which has given the parameters other gradient arrays
        is_float16 = train.precision == 'float16'
        self.can_skip = is_float16 and train.loss_scale_policy == 'dynamic'
        self.loss_scale = LossScale(train.loss_scale if is_float16 else 1.0)
        num_buckets = config.comm.num_buckets
        self.optimizer = Optimizer(trained, config.optimizer, num_buckets, self.can_skip)
        averaged = {t.name: t.exact for t in self.optimizer.tensors} | self.statistics
        self.ema = MovingAverage(train.ema, {f'ema/{n}': a for n, a in averaged.items()})

        # times and counts of the steps
        self.timer = StepTimer(on_exchange, on_step)
        self._on_pass = on_pass
        self._num_bytes = self._num_new_bytes = 0
        self._flag_arrays: dict[Flags, NDArray] = {}

    def broadcast(self) -> None:
        """Copy rank 0's weights, statistics and optimizer state to all ranks."""
        self.comm.broadcast({**self.optimizer.owners(), **self.statistics, **self.ema.arrays})

    def step(
        self,
        batches: Iterator[Batch],
        step_in_epoch: int,
        lr: float,
        requests: Flags = NO_FLAGS,
        with_norms: bool = False,
    ) -> PendingStep:
        """Push one optimizer step, with one batch per pass, to MXNet's engine without waiting for
        it."""
        loss = 0.0
        pushed = deque[NDArray](maxlen=_PASSES_AHEAD)
        for micro in range(self._num_micro):
            asked_at = time.monotonic()
            batch = next(batches)
            if micro == 0:
                self.timer.mark_data(asked_at, batch.read_s, batch.decode_s)
            self._num_bytes += batch.num_bytes
            self._num_new_bytes += batch.num_new_bytes
            losses = self.forward(batch)
            losses.backward()
            for grad, total in self._manual_sums:
                total += grad
            loss = losses.detach().sum() + loss
            if len(pushed) == _PASSES_AHEAD:
                wait_for(pushed[0])
                self._on_pass()
            pushed.append(loss)
        for grad, total in self._manual_sums:
            grad[:] = total
            total[:] = 0
        sums = self.exchange(loss, step_in_epoch, requests)
        return self.update(sums, step_in_epoch, lr, with_norms)

    def take_bytes(self) -> tuple[int, int]:
        """Return the record bytes read since the last call, and how many of them this node read for
        the first time."""
        taken = self._num_bytes, self._num_new_bytes
        self._num_bytes = self._num_new_bytes = 0
        return taken

    def forward(self, batch: Batch) -> NDArray:
        """Return the weighted losses of a batch, ready for backward(); float32, shape (local
        batch,)."""
        with autograd.record():
            logits = self.nets[batch.images.shape[2]](batch.images)
            weights = (self._positions < batch.num_valid) * (
                self.loss_scale.value * self.plan.loss_weight
            )
            return self._loss(logits, batch.labels, weights)

    def exchange(self, loss: NDArray, step_in_epoch: int, requests: Flags = NO_FLAGS) -> NDArray:
        """Average gradients over ranks; return mean loss, and the sums of the requests, in the
        order of Flags."""
        timer, buckets = self.timer, self.optimizer.buckets
        last = self.optimizer.tensors[-1].grad
        computed = timer.mark(last)
        # The loss is summed first because it is ready before the gradients.
        mean = loss * (self._rescale(step_in_epoch) / self.comm.world_size)
        if requests not in self._flag_arrays:
            self._flag_arrays[requests] = nd.array(requests, self.context)
        sums = self.comm.sum_in_background(nd.concat(mean, self._flag_arrays[requests], dim=0))
        # Some steps have stamps of their buckets, before and after the exchange of each. A single
        # rank has one stamp, after its backward pass.
        is_alone = self.comm.world_size == 1
        ready, done = None, []
        if timer.is_sampling and is_alone:
            ready = [timer.separate([g for b in buckets for g in b.grads])]
        elif timer.is_sampling:
            ready = [timer.stamp(b.last) for b in buckets]
        for number, bucket in enumerate(buckets):
            self.comm.average_gradients(bucket.grads, number)
        if ready and not is_alone:
            done = [timer.stamp(b.last) for b in buckets]
        timer.mark_exchange(computed, timer.mark(last), ready, done)
        return sums

    def update(
        self, sums: NDArray, step_in_epoch: int, lr: float, with_norms: bool = False
    ) -> PendingStep:
        optimizer, rescale = self.optimizer, self._rescale(step_in_epoch)
        is_finite = optimizer.all_finite() if self.can_skip else None
        applied = optimizer.step(lr, self.plan.fraction(step_in_epoch), rescale, is_finite)
        norms = None
        if with_norms:
            norms = Norms(rescale, optimizer.squared_norms(), optimizer.trust_ratios())
        self.timer.mark_update(self.timer.mark(optimizer.buckets[-1].tensors[-1].weight))
        if self._num_micro > 1:
            for tensor in optimizer.tensors:
                tensor.grad[:] = 0
        return PendingStep(sums, applied, self.loss_scale.value, is_finite, norms)

    def _rescale(self, step_in_epoch: int) -> float:
        """Return the factor that converts a mean over ranks to the mean over the images of a
        step."""
        return 1 / (self.plan.fraction(step_in_epoch) * self.loss_scale.value)

    def read(self, pending: PendingStep) -> tuple[float, Flags]:
        """Wait for a step; return its mean loss and the requests of all ranks, or raise MXNetError
        if it failed."""
        loss, *requests = (float(v) for v in pending.sums.asnumpy())
        self.timer.check()
        if pending.is_finite is not None:
            self.loss_scale.read(pending.loss_scale, bool(pending.is_finite.asscalar()))
        return loss, Flags(*(num > 0 for num in requests))

    def average_statistics(self) -> None:
        """Average running statistics over ranks in place, which is valid after any step because
        updates are linear."""
        self.settle()
        if self.statistics:
            arrays = self.arrays().items()
            self.comm.average([a for n, a in arrays if n.rpartition('/')[2] in self.statistics])

    @contextmanager
    def evaluating(self) -> Iterator[Forward]:
        """Average statistics; yield the network for evaluations, with its current or averaged
        (train.ema) weights."""
        self.average_statistics()
        params = {n: p.data() for n, p in self.net.collect_params().items()}
        changed = [n for n in params if n in self._variance_factors or self.ema.arrays]
        before = {n: params[n].copy() for n in changed}
        for name in changed:
            self._evaluated(name, params[name]).copyto(params[name])
        if self.folded:
            self.folded.copy_weights(self.net)
        yield with_mirror(self.folded.net if self.folded else self.net, self.plan.config)
        for name, array in before.items():
            array.copyto(params[name])

    def _evaluated(self, name: str, array: NDArray) -> NDArray:
        """Return a copy of a parameter as evaluations use it: averaged (train.ema), with an
        unbiased variance."""
        averaged = self.ema.arrays.get(f'ema/{name}', array).astype(array.dtype)
        return averaged * self._variance_factors.get(name, 1)

    def settle(self) -> None:
        """Wait for every pushed step."""
        # Waiting for one array is not enough, because a static graph updates running statistics and
        # converts weights to oneDNN's layout in operations that the array does not depend on.
        nd.waitall()
        self.timer.drain()

    def arrays(self) -> dict[str, NDArray]:
        """Return the arrays that a checkpoint contains, without copying them, by their names in the
        checkpoint."""
        weights = {t.name: t.weight for t in self.optimizer.tensors}
        return {
            **{f'model/{n}': a for n, a in {**weights, **self.statistics}.items()},
            **{f'optimizer/{n}': a for n, a in self.optimizer.state().items()},
            **self.ema.arrays,
        }

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that each rank exchanges in a step."""
        is_small = self.plan.config.gradient_compression == 'fp16'
        grads = [t.grad for t in self.optimizer.tensors]
        return sum(g.size * (2 if is_small else g.dtype().itemsize) for g in grads)

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: a.shape for n, a in self.arrays().items()}

    def snapshot(self) -> npz.Arrays:
        """Return copies of the arrays that a checkpoint contains; after average_statistics, they
        agree on all ranks.

        Their variances are unbiased, in float64 so that from_unbiased restores the same bits.
        """
        self.settle()
        return self._scale_variances({n: a.asnumpy() for n, a in self.arrays().items()}, 1)

    def from_unbiased(self, arrays: npz.Arrays) -> npz.Arrays:
        """Return arrays with variances as MXNet's operators on this device average them."""
        return self._scale_variances(arrays, -1)

    def _scale_variances(self, arrays: npz.Arrays, exponent: int) -> npz.Arrays:
        result = dict(arrays)
        for name, factor in self._variance_factors.items():
            for key in {name, f'model/{name}', f'ema/{name}'} & arrays.keys():
                result[key] = arrays[key].astype(np.float64) * factor**exponent
        return result

    def copy_network(self) -> dict[str, NDArray]:
        return {n: self._evaluated(n, p.data()) for n, p in self.net.collect_params().items()}

    def digests(self) -> dict[str, int]:
        """Return the CRC-32 of every array of a snapshot, by name; on a GPU, digests that need no
        copy to the host."""
        if self.context.device_type == 'gpu':
            return device_digests(self.arrays())
        return {n: zlib.crc32(a.asnumpy()) for n, a in self.arrays().items()}

    def find_non_finite(self) -> str | None:
        """Return the name of the first array of a snapshot that contains a NaN or an infinity."""
        arrays = self.arrays()
        # where this is faster than a copy to the host; on a CPU, it is slower
        if self.context.device_type == 'gpu':
            each = (nd.multi_all_finite(a, num_arrays=1) for a in arrays.values())
            are_finite = nd.concat(*each, dim=0).asnumpy()
            return next((n for n, is_finite in zip(arrays, are_finite) if not is_finite), None)
        return next((n for n, a in arrays.items() if npz.find_non_finite({n: a.asnumpy()})), None)

    def state(self) -> TrainerState:
        """Return a copy of the state that a checkpoint contains; after average_statistics, it
        agrees on all ranks."""
        return TrainerState(
            self.snapshot(),
            last_lr=self.optimizer.last_lr or 0.0,
            loss_scale=self.loss_scale.value,
            num_finite_steps=self.loss_scale.num_finite_steps,
        )

    def load_state(self, state: TrainerState) -> None:
        """Continue on all ranks from rank 0's state."""
        self.settle()
        if self.comm.rank == 0:
            self._set(state.arrays)
        self.broadcast()
        self.optimizer.last_lr = state.last_lr or None
        if self.plan.config.train.loss_scale_policy == 'dynamic':
            self.loss_scale = LossScale(state.loss_scale, state.num_finite_steps)

    def _set(self, arrays: npz.Arrays) -> None:
        arrays = self.from_unbiased(arrays)
        for name, array in self.arrays().items():
            # copyto also works for an array that a graph has converted to oneDNN's layout.
            nd.array(arrays[name], self.context, array.dtype).copyto(array)

    def warm_up(
        self, streams: Iterable[Iterator[Batch]], eval_batch: Batch, num_steps: int
    ) -> None:
        """Run num_steps steps of each stream and an evaluation on synthetic images, then restore
        the network.

        There is a stream for each size. Steps that overflow lower the loss scale and do not count.
        The run starts with the resulting scale.
        """
        if not num_steps:
            return
        before = self.snapshot()
        for batches in streams:
            num_done = 0
            while num_done < num_steps:
                used = self.loss_scale.value
                self.read(self.step(batches, 0, 1e-3))
                num_done += self.loss_scale.value >= used
                self._on_pass()
        self.loss_scale.num_finite_steps = 0
        with self.evaluating() as net:
            logits = net(eval_batch.images)
            correct_counts(logits, eval_batch.labels, eval_batch.num_valid)
        self.digests()
        self.settle()
        self._set(before)
        self.settle()
        self.optimizer.last_lr = None
        self.timer.take()
