"""Benchmarks: arithmetic and printed tables."""

import mxnet as mx
import pytest

from mlperf_rn50.bench.measure import (
    ResultTable,
    parse_list,
    parse_numbers,
    render_tables,
    spread_of,
)
from mlperf_rn50.bench.operators import Convolution, convolutions
from mlperf_rn50.bench.steps import (
    Case,
    bus_bandwidth,
    case_config,
    make_cases,
    predict_s,
    scaling_rows,
)
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import ResNet
from mlperf_rn50.model.zoo import count_flops
from mlperf_rn50.train.comm.device import gemm_times


def test_spread_of_times():
    s = spread_of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (s.low_s, s.median_s, s.high_s, s.mean_s, s.num) == (2, 3, 4, 3, 5)
    assert s.relative == pytest.approx(1 / 3)
    single = spread_of([2.0])
    assert (single.median_s, single.relative, single.num) == (2, 0, 1)


def test_list_options_are_parsed():
    assert parse_numbers('--ranks', '1, 2,4') == [1, 2, 4]
    assert parse_list('--models', 'a,b', ['a', 'b', 'c']) == ['a', 'b']
    for text in ('1,', '0', '1.5'):
        with pytest.raises(ConfigError, match='--ranks: got'):
            parse_numbers('--ranks', text)
    with pytest.raises(ConfigError, match="--models: got 'd', expected one or more of a,b,c"):
        parse_list('--models', 'a,d', ['a', 'b', 'c'])


def test_grid_starts_with_float32():
    cases = make_cases(['a', 'b'], ['bfloat16', 'float32'], ['synthetic'], [8], [1, 2])
    assert [(c.precision, c.model, c.num_ranks) for c in cases] == [
        (p, m, n) for p in ('float32', 'bfloat16') for m in 'ab' for n in (1, 2)
    ]


@pytest.mark.parametrize(
    'name, configured, expected',
    [('resnet50', 224, 224), ('inception_v3', 224, 299), ('inception_v3', 128, 128)],
)
def test_synthetic_images_have_the_size_of_the_network(name, configured, expected):
    config = Config(data=DataConfig(image_size=configured))
    case = case_config(config, Case(name, 'float32', 'synthetic', 8, 1))
    assert (case.data.image_size, case.train.local_batch_size, case.data.synthetic) == (
        expected,
        8,
        True,
    )
    assert case_config(config, Case(name, 'float32', 'real', 8, 1)).data.image_size == configured


def test_scaling_efficiency_of_study_3():
    rows = scaling_rows(
        [
            {'num_ranks': n, 'num_hosts': -(-n // 4), 'images_per_s': real}
            for n, real in ((1, 626), (4, 2425), (8, 4500))
        ]
    )
    assert [(r['num_hosts'], r['ideal'], round(100 * r['efficiency'])) for r in rows] == [
        (1, 626, 100),
        (1, 2504, 97),
        (2, 5008, 90),
    ]


def test_bus_bandwidth_follows_nccl_tests_and_prediction_interpolates_measured_sizes():
    assert (bus_bandwidth(1000, 0.5, 2), bus_bandwidth(1000, 0.5, 8)) == (2000, 2000 * 7 / 4)
    rows = [
        {'bytes': 100, 'time_ms': 2.0},
        {'bytes': 300, 'time_ms': 4.0},
        {'bytes': 400, 'time_ms': 8.0},
    ]
    assert [1000 * predict_s(rows, n) for n in (10, 100, 200, 300, 350, 400, 800)] == pytest.approx(
        [2, 2, 3, 4, 6, 8, 16]
    )


@pytest.mark.parametrize('name, image_size', [('resnet50', 96), ('resnet18', 224)])
def test_convolutions_match_the_network(name, image_size):
    config = Config(
        model=ModelConfig(name=name), data=DataConfig(image_size=image_size, num_classes=10)
    )
    counts = convolutions(config)
    dense = 2 * 10 * (2048 if name == 'resnet50' else 512)
    net = ResNet(config, image_size=image_size)
    assert sum(c.flops(1) * n for c, n in counts.items()) + dense == count_flops(
        net, (3, image_size, image_size)
    )
    assert sum(counts.values()) == {'resnet50': 53, 'resnet18': 20}[name]
    assert counts[Convolution(3, 64, image_size, 7, 2)] == 1


def test_every_product_of_a_measurement_is_computed(monkeypatch):
    plain, done = mx.nd.FullyConnected, []
    monkeypatch.setattr(
        mx.nd, 'FullyConnected', lambda *a, **keys: done.append(plain(*a, **keys)) or done[-1]
    )
    assert len(gemm_times(8, 'float32', mx.cpu(), 3, 4)) == 3
    assert len(done) == (2 + 3) * 4 and {d.shape for d in done} == {(8, 8)}


MACHINE = {
    'cpu': 'A CPU',
    'processor': {'uses': 'AVX2'},
    'cpu_cores': 2,
    'gpus': [],
    'num_hosts': 1,
    'omp_threads_per_rank': 2,
    'packages': {'mlperf-rn50': '1.2', 'mxnet': '1.9.1'},
}
TABLES = [
    ResultTable(
        'Steps',
        (('name', 'model', 's'), ('ms', 'ms', ',.1f'), ('share', 'of peak', '.0%')),
        [{'name': 'a\x1b[1m', 'ms': 1234.56, 'share': 0.5}, {'name': 'b', 'ms': None, 'share': 1}],
        'A note.',
    )
]


def test_tables_name_the_measured_machine():
    assert render_tables(MACHINE, TABLES) == (
        'A CPU (AVX2), 2 cores, 2 threads per rank, 1 host; mlperf-rn50 1.2, mxnet '
        '1.9.1\n\nSteps\nmodel         ms    of peak\n-------  -------  ---------\na?[1m    '
        '1,234.6        50%\nb              -       100%\nA note.'
    )
