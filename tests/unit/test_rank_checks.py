"""Digests of arrays, diverging ranks, stragglers, and waits for a device."""

from itertools import product
from unittest.mock import MagicMock

import mxnet as mx
import numpy as np
import pytest
from helpers import ROOT, json_table

from mlperf_rn50.train.comm.horovod import wait_for
from mlperf_rn50.train.comm.rank_checks import describe_divergence, device_digests, find_stragglers


def test_waiting_for_a_gpu_copies_an_element():
    """With the asynchronous engine, wait_to_read() returns after the launch of the operator that
    writes the array."""
    array = MagicMock(context=mx.gpu())
    wait_for(array)
    flat = array.reshape.return_value
    flat.__getitem__.assert_called_once_with(slice(None, 1))
    flat[:1].asnumpy.assert_called_once_with()
    wait_for(mx.nd.arange(6))
    modules = (ROOT / 'mlperf_rn50').rglob('*.py')
    assert [p.name for p in modules if '.wait_to_read' in p.read_text()] == ['horovod.py']


def test_diverging_rank_of_three_is_named_with_the_first_array():
    good = {'model/a': 1, 'model/b': 2, 'optimizer/a': 3}
    message = describe_divergence([good, good, {**good, 'model/b': 7, 'optimizer/a': 8}], 4)
    assert 'after epoch 5: rank 2 of 3, first in model/b (2 of 3 arrays differ)' in message
    # With two ranks, it is unknown which one diverged.
    assert 'rank 0, 1 of 2, first in a (1 of 1' in describe_divergence([{'a': 1}, {'a': 2}], 0)


def times(*seconds):
    usual = {'cores': '0-3', 'num_steps': 10, 'data_s': 0.05, 'wait_s': 1.2}
    return [{'rank': r, 'host': f'h{r}', 'compute_s': s, **usual} for r, s in enumerate(seconds)]


@pytest.mark.parametrize(
    'seconds, slow',
    json_table("""
[1, 1, 1.25, 1] | "2"
[1, 1.14, 1, 1] | ""
[1, 2, 1, 3, 1] | "31"  # the slowest first
[1, 1.2]        | "1"
[5]             | ""
"""),
)
def test_rank_slower_than_the_median_is_a_straggler(seconds, slow):
    found = find_stragglers(times(*seconds))
    assert ''.join(text.split()[1] for text in found) == slow
    if slow == '2':
        assert 'on h2 (cores 0-3) is slow: it computes for 125 ms per step (median 100' in found[0]
        assert 'lose 10% of each step' in found[0]


@pytest.mark.parametrize('dtype, bits', [('float32', np.uint32), ('float16', np.uint16)])
def test_device_digest_depends_on_each_bit_and_position(dtype, bits):
    values = np.array([0.0, 1e-45, -3e-8, 1.5, 2.5, 0.1], np.float32).astype(dtype)

    def digest(values):
        first, second = mx.nd.array(values[:4].reshape(2, 2), dtype=dtype), values[4:]
        return device_digests({'a': first, 'b': mx.nd.array(second, dtype=dtype)})['a to b']

    different = [values, values[::-1], values[[0, 1, 2, 4, 3, 5]], values * np.nan]
    different += [sign * np.zeros_like(values) for sign in (1, -1)]
    for i, bit in product(range(6), range(8 * values.itemsize)):
        flipped = values.copy()
        flipped.view(bits)[i] ^= bits(1 << bit)
        # a conversion to float32 may change a NaN's bits
        different += [flipped] * (not np.isnan(flipped).any())
    digests = [digest(v) for v in different]
    assert len(set(digests)) == len(digests) and digest(values.copy()) == digests[0]


def test_device_digests_name_the_group_and_are_read_while_their_memory_is_held(monkeypatch):
    """MXNet does not know that a digest reads the memory of joined arrays, and could give it to
    other operators."""
    arrays = {f'w{i}': mx.nd.ones((i + 1, 3)) for i in range(20)}
    before = device_digests(arrays)
    arrays['w9'][0, 1] = np.nextafter(np.float32(1), np.float32(2))
    plain, read = mx.nd.NDArray.asscalar, []

    def reading(self):
        read.append(plain(self))
        return read[-1]

    monkeypatch.setattr(mx.nd.NDArray, 'asscalar', reading)
    after = device_digests(arrays)
    assert list(before) == ['w0 to w3', 'w4 to w7', 'w8 to w11', 'w12 to w15', 'w16 to w19']
    assert [n for n in before if before[n] != after[n]] == ['w8 to w11']
    assert list(after.values()) == read
