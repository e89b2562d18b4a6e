"""What only training needs of a network: its loss, and the moving average of its weights and
statistics (train.ema)."""

from collections.abc import Mapping

from mxnet import nd
from mxnet.gluon import HybridBlock

PERIOD = 4  # steps between two updates, because an update takes a pass over all weights


class SmoothedCrossEntropy(HybridBlock):
    """Weighted cross entropy per image; the fraction `smoothing` of the target is spread evenly
    over all classes."""

    def __init__(self, smoothing: float):
        super().__init__()
        self._smoothing = smoothing

    def hybrid_forward(self, F, logits, labels, weights):
        log_p = F.log_softmax(logits, axis=-1)
        loss = -F.pick(log_p, labels, axis=-1)
        if self._smoothing:
            loss = (1 - self._smoothing) * loss - self._smoothing * F.mean(log_p, axis=-1)
        return loss * weights


class MovingAverage:
    """Averages of arrays, float32, by name; none with decay None."""

    def __init__(self, decay: float | None, sources: Mapping[str, nd.NDArray]):
        self._decay = decay or 0.0
        self._sources = {} if decay is None else sources
        self.arrays = {name: nd.zeros(a.shape, a.context) for name, a in self._sources.items()}

    def update(self, step: int) -> None:
        """Queue an update after step 1, counted from 1, and after every PERIOD steps from then on,
        without waiting."""
        number, rest = divmod(step - 1, PERIOD)
        if rest or not self.arrays:
            return
        # An update stands for PERIOD steps. The first one copies the values, so initial values have
        # no share.
        kept = self._decay**PERIOD
        share = (1 - kept) / (1 - kept ** (number + 1))
        for name, array in self.arrays.items():
            source = self._sources[name]
            # a backward pass changes statistics, but MXNet lets only a write wait for it
            if 'running_' in name:
                source *= 1
            # One operator: array - share (array - source), as a step of SGD with weight decay.
            nd.sgd_update(
                array, source, out=array, lr=share, wd=1.0, rescale_grad=-1.0, lazy_update=False
            )
