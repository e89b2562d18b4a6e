"""Layers for a dry run: NHWC and float16 on a CPU, which has neither, by way of NCHW and float32.

What comes out of a layer is rounded to float16, as on a GPU; sums within it are those of float32.
"""
from contextlib import contextmanager

import numpy as np
from mxnet.gluon import nn


class _OnCpu:
    """A layer that takes what a CPU does not, turns it into what a CPU does, and its output back."""

    _precision = 'float32'

    def cast(self, dtype):
        super().cast(dtype)
        self._precision = np.dtype(dtype).name

    def hybrid_forward(self, F, x, **params):
        own = getattr(self, '_kwargs', {})
        is_last = own.get('layout') == 'NHWC'
        if not is_last and self._precision == 'float32':
            return super().hybrid_forward(F, x, **params)
        x, params = F.cast(x, dtype='float32'), {n: F.cast(p, dtype='float32') if n in ('weight', 'bias') else p
                                                 for n, p in params.items()}
        if not is_last:
            return F.cast(super().hybrid_forward(F, x, **params), dtype=self._precision)
        params = {n: F.transpose(p, axes=(0, 3, 1, 2)) if n == 'weight' else p for n, p in params.items()}
        self._kwargs = {**own, 'layout': 'NCHW'}
        y = super().hybrid_forward(F, F.transpose(x, axes=(0, 3, 1, 2)), **params)
        self._kwargs = own
        return F.cast(F.transpose(y, axes=(0, 2, 3, 1)), dtype=self._precision)


_NAMES = ('Conv2D', 'BatchNorm', 'Dense', 'MaxPool2D', 'GlobalAvgPool2D')
STAND_INS = {name: type(name, (_OnCpu, getattr(nn, name)), {}) for name in _NAMES}


@contextmanager
def stand_ins():
    """Gives Gluon these layers for a while."""
    before = {name: getattr(nn, name) for name in _NAMES}
    for name, layer in STAND_INS.items():
        setattr(nn, name, layer)
    try:
        yield
    finally:
        for name, layer in before.items():
            setattr(nn, name, layer)
