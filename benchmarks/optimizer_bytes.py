"""Bytes of GPU memory that the optimizer reads and writes in a step of ResNet-50 in float16,
counted by operator.

Counts the arguments of the operators that Optimizer calls, on a CPU; no GPU is needed. An operator
reads its inputs and writes its outputs once, except that `where` reads only the array that it
selects, and that updates do not read float16 weights. Usage: .venv/bin/python
benchmarks/optimizer_bytes.py
"""

import ctypes
from collections import Counter

import mxnet as mx
from mxnet.ndarray import register
from tabulate import tabulate

from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.resnet import ResNet
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.options import OptimizerConfig


def name_of(handle) -> str:
    name = ctypes.c_char_p()
    mx.base.check_call(
        mx.base._LIB.MXSymbolGetAtomicSymbolName(ctypes.c_void_p(handle), ctypes.byref(name))
    )
    return name.value.decode()


def num_bytes(arrays) -> int:
    return sum(a.size * a.dtype().itemsize for a in arrays)


def moved(name: str, inputs, outputs) -> int:
    """Return the bytes that a call of an operator moves."""
    # 20 per element: gradient and weights, velocity and masters both ways
    if name.endswith('sgd_mom_update'):
        return 20 * sum(w.size for w in outputs)
    return (2 * num_bytes(outputs)) if name == 'where' else num_bytes(inputs) + num_bytes(outputs)


def count_step(config: OptimizerConfig, can_skip: bool) -> Counter[str]:
    """Return the bytes by operator of one step."""
    net = ResNet(Config(data=DataConfig(pad_to_4_channels=True)))
    net.initialize()
    net.cast('float16')
    params = {n: p for n, p in net.collect_params().items() if p.grad_req != 'null'}
    optimizer, counts, plain = (
        Optimizer(params, config, 1, can_skip),
        Counter[str](),
        register._imperative_invoke,
    )
    optimizer.group_size = 54

    def counted(handle, arrays, keys, values, out, *flags):
        result = plain(handle, arrays, keys, values, out, *flags)
        name, outputs = name_of(handle), result if isinstance(result, list) else [result]
        counts[name] += moved(name, arrays, outputs)
        return result

    register._imperative_invoke = counted
    optimizer.step(0.1, is_finite=optimizer.all_finite() if can_skip else None)
    register._imperative_invoke = plain
    mx.nd.waitall()
    return counts


def main() -> None:
    for name in ('sgd', 'lars'):
        rows = []
        for policy in ('dynamic', 'static'):
            counts = count_step(OptimizerConfig(name), policy == 'dynamic')
            rows += [
                [policy, operator, n / 1e6] for operator, n in counts.most_common() if n >= 1e6
            ]
            rows.append([policy, 'all', counts.total() / 1e6])
        print(f'{name}\n{tabulate(rows, ["policy", "operator", "MB"], floatfmt=",.0f")}')


if __name__ == '__main__':
    main()
