"""Benchmarks: arithmetic and printed tables."""

import re
import time
from unittest.mock import Mock

import mxnet as mx
import pytest
from helpers import json_table, wait_for
from pytest import approx

from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.bench import input_speed, measure, steps
from mlperf_rn50.bench.measure import (
    BenchSession,
    ResultTable,
    make_answer,
    parse_list,
    parse_numbers,
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
from mlperf_rn50.cli import bench, ranks
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import ResNet
from mlperf_rn50.model.zoo import count_flops
from mlperf_rn50.system.environment import host_facts
from mlperf_rn50.train.comm.device import gemm_times
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import CommConfig, TrainConfig
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def test_spread_of_times():
    s, single = spread_of([4.0, 1.0, 3.0, 2.0, 5.0]), spread_of([2.0])
    assert (s.low_s, s.median_s, s.high_s, s.mean_s, s.num) == (2, 3, 4, 3, 5)
    assert s.relative == approx(1 / 3)
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
    'name, source, configured, expected',
    json_table("""
"resnet50"     | "synthetic" | 224 | 224
"inception_v3" | "synthetic" | 224 | 299
"inception_v3" | "synthetic" | 128 | 128
"inception_v3" | "real"      | 224 | 224
"""),
)
def test_synthetic_images_have_the_size_of_the_network(name, source, configured, expected):
    config = Config(data=DataConfig(image_size=configured))
    found = case_config(config, Case(name, 'float32', source, 8, 1))
    shown = found.data.image_size, found.train.local_batch_size, found.data.synthetic
    assert shown == (expected, 8, source == 'synthetic')


def test_each_case_exchanges_gradients_as_its_precision_does(monkeypatch):
    seen = []
    monkeypatch.setattr(
        steps, 'measure_case', lambda session, case: seen.append(session.comm.compression)
    )
    config = Config(
        comm=CommConfig(compression='fp16'),
        model=ModelConfig(fused_bn_relu=False),
        train=TrainConfig(device='gpu'),
    )
    comm = Comm()
    comm.rank = 1  # only rank 0 has tables
    cases = [Case('resnet18', precision, 'synthetic', 8, 1) for precision in ('float16', 'float32')]
    steps.bench_steps(BenchSession(config, comm, None, Heartbeat(), 1, 1), cases)
    assert seen == ['none', 'fp16']


def test_input_is_not_read_before_it_is_measured_cold(monkeypatch):
    caches = []

    def measure(session, cache):
        caches.append(cache)
        return {'images_per_s': 1.0, 'record_bytes': 1.0}

    monkeypatch.setattr(input_speed, 'measure_input', measure)
    monkeypatch.setattr(input_speed, 'find_split', Mock())
    session = BenchSession(Config(), Comm(), None, Heartbeat(), 1, 1)
    input_speed.bench_input(session, [1], [8], ['cold'], None)
    assert caches == ['cold', 'cold']


def test_scaling_efficiency_of_study_3():
    rows = scaling_rows(
        [
            {'num_ranks': ranks, 'num_hosts': hosts, 'images_per_s': speed}
            for ranks, hosts, speed in ((1, 1, 626), (4, 1, 2425), (8, 2, 4500))
        ]
    )
    columns = [[r[key] for r in rows] for key in ('num_ranks', 'num_hosts', 'ideal', 'real')]
    assert columns == [[1, 4, 8], [1, 1, 2], [626, 2504, 5008], [626, 2425, 4500]]
    assert [round(100 * r['efficiency']) for r in rows] == [100, 97, 90]


def test_bus_bandwidth_follows_nccl_tests_and_prediction_interpolates_measured_sizes():
    assert (bus_bandwidth(1000, 0.5, 2), bus_bandwidth(1000, 0.5, 8)) == (2000, 2000 * 7 / 4)
    rows = [{'bytes': b, 'time_ms': ms} for b, ms in ((100, 2.0), (300, 4.0), (400, 8.0))]
    predicted = [1000 * predict_s(rows, n) for n in (10, 100, 200, 300, 350, 400, 800)]
    assert predicted == approx([2, 2, 3, 4, 6, 8, 16])


@pytest.mark.parametrize(
    'name, size, features, num', [('resnet50', 96, 2048, 53), ('resnet18', 224, 512, 20)]
)
def test_convolutions_match_the_network(name, size, features, num):
    data = DataConfig(image_size=size, num_classes=10)
    config = Config(model=ModelConfig(name=name), data=data)
    counts = convolutions(config)
    flops = count_flops(ResNet(config, image_size=size), (3, size, size))
    assert sum(c.flops(1) * n for c, n in counts.items()) + 2 * 10 * features == flops
    assert (sum(counts.values()), counts[Convolution(3, 64, size, 7, 2)]) == (num, 1)


def test_every_product_of_a_measurement_is_computed(monkeypatch):
    spy = Mock(wraps=mx.nd.FullyConnected)
    monkeypatch.setattr(mx.nd, 'FullyConnected', spy)
    assert len(gemm_times(8, 'float32', mx.cpu(), 3, 4)) == 3
    assert spy.call_count == (2 + 3) * 4
    assert {a.shape for call in spy.call_args_list for a in call.args} == {(8, 8)}


def test_tables_name_the_measured_machine(monkeypatch):
    columns = """
        name   model    s
        ms     ms       ,.1f
        share  of peak  .0%"""
    rows = [
        {'name': 'a\x1b[1m', 'ms': 1234.56, 'share': 0.5},
        {'name': 'b', 'ms': None, 'share': 1},
    ]
    answer = make_answer('train', 1, [ResultTable('Steps', columns, rows, 'A note.')])
    first, _, *lines = render_text(answer).splitlines()
    machine = (
        r'.* \(.*\), \d+ cores, .*\d+ threads per rank, 1 host; mlperf-rn50 .*, mxnet.* [\d.]+'
    )
    assert re.fullmatch(machine, first)
    assert (
        '\n'.join(lines)
        == """Steps
model         ms    of peak
-------  -------  ---------
a?[1m    1,234.6        50%
b              -       100%
A note."""
    )
    facts = {**host_facts(), 'gpus': ['NVIDIA H100']}
    monkeypatch.setattr(measure, 'host_facts', lambda: facts)
    for device, gpus in (('cpu', []), ('gpu', ['NVIDIA H100'])):  # predict counts them
        assert make_answer('train', 1, [], device).data['machine']['gpus'] == gpus
    assert answer.data['format'] == 'mlperf-rn50 bench train 1'
    assert answer.data['tables'] == [{'title': 'Steps', 'note': 'A note.', 'rows': rows}]


@pytest.mark.parametrize('words, batch', [('', 32), ('--train.local_batch_size 8', 8)])
def test_batch_is_that_of_the_options(monkeypatch, words, batch):
    given = Mock(return_value=0)
    monkeypatch.setattr(ranks, 'in_rank', given)
    bench.run(['train', *words.split()])
    assert given.call_args.args[1].train.local_batch_size == batch


def test_rank_that_waits_for_a_case_of_others_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr(steps, '_BEAT_S', 0.01)
    heartbeat = Heartbeat()
    with steps.waiting(heartbeat):
        wait_for(lambda: heartbeat.num_beats > 2)
    num_beats = heartbeat.num_beats
    time.sleep(0.05)
    assert heartbeat.num_beats == num_beats
