"""Samples of a node, and the way back from their file."""
import json
import math
import sys

import pytest
from helpers import wait_for, write_files
from lines import run_lines, write_lines
from made_systems import study_of

from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.mlperf.telemetry import read_node, read_telemetry
from mlperf_rn50.study.report_picture import render_svg
from mlperf_rn50.study.report_plots import draw_study
from mlperf_rn50.system import telemetry
from mlperf_rn50.system.telemetry import Telemetry, host_file_name, make_rates, read_counters


def test_rates_are_of_bytes_per_second():
    before = {'disk_read': {'a': 100, 'b': 50}, 'net_send': {'eth0': 0}, 'infiniband_send': {}}
    after = {'disk_read': {'a': 300, 'b': 40, 'new': 900}, 'net_send': {'eth0': 10}, 'infiniband_send': {}}
    assert make_rates(before, after, 2.0) == {
        'disk_read_bytes_per_s': {'a': 100, 'b': 0, 'new': 0}, 'net_send_bytes_per_s': {'eth0': 5}}


def test_infiniband_counts_words_of_four_bytes(tmp_path):
    write_files(tmp_path, {'class/infiniband/mlx5_0/ports/1/counters/port_rcv_data': 1000})
    found = read_counters(tmp_path)
    assert found['infiniband_receive'] == {'mlx5_0/1': 4000}
    assert found['infiniband_send'] == {}  # not readable, which is no 0
    assert found['disk_read'] == {}  # no block device has hardware there
    assert 'lo' in found['net_send']


def test_a_node_is_sampled_until_it_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, 'SYS', tmp_path)  # this machine may have meters of energy, of which more is said
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    monkeypatch.setattr(telemetry, 'PERIOD_S', 0.02)
    path = tmp_path / 'telemetry_0_n1.jsonl'
    for _ in range(2):  # a resumed run goes on in the same file
        sampler = Telemetry(path)
        sampler.run_start(100.0)
        wanted = path.read_text().count('cpu_percent') + 3
        wait_for(lambda wanted=wanted: path.read_text().count('cpu_percent') >= wanted, lambda: True, path.read_text)
        sampler.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [x['event'] for x in lines if 'event' in x] == ['start', 'run_start'] * 2
    sample = next(x for x in lines if 'cpu_percent' in x)
    assert {'time_ms', 'memory_used_bytes', 'page_cache_bytes', 'net_send_bytes_per_s'} <= set(sample)
    node = read_node(path)
    assert node.host == 'n1' and len(node.times_s) >= 4 and 100 <= node.times_s[0] < 130


def test_names_of_hosts_are_names_of_files():
    assert host_file_name('../n1 x') == '.._n1_x'


def sample(time_s, **values):
    return json.dumps({'time_ms': round(1000 * (5000 + time_s)), **values})


def write_node(folder, host, *lines):
    path = folder / f'telemetry_0_{host}.jsonl'
    path.write_text('\n'.join(lines) + '\n')
    return path


def test_reading_aligns_to_the_clock_of_the_run_and_survives_rubbish(tmp_path):
    path = write_node(
        tmp_path, 'n_1', sample(-3, event='start'), sample(-2, cpu_percent=1.0),
        sample(0, event='run_start', clock_s=0.0),
        sample(1, cpu_percent=50.0, disk_read_bytes_per_s={'sda': 7, 'sdb': 1},
               net_send_bytes_per_s={'lo': 100, 'eth0': 3}, infiniband_send_bytes_per_s={'mlx5_0/1': 4}),
        'not json', '[' * 100_000, '[]', '{"time_ms": "x"}', '{"time_ms": 1e400}', sample(1.5, cpu_percent='many'),
        sample(1.6, net_send_bytes_per_s={'eth0': -1}), sample(2, net_send_bytes_per_s={}),
        sample(60, event='run_start', clock_s=10.0), sample(61, page_cache_bytes=5))
    node = read_node(path)
    assert node.host == 'n_1' and node.times_s == pytest.approx((1, 2, 11))
    nan = math.nan  # what a sample does not say is no 0
    assert node.rates['disk read'] == pytest.approx((8, nan, nan), nan_ok=True)
    assert node.rates['network send'] == pytest.approx((7, nan, nan), nan_ok=True)
    assert node.cpu_percent == pytest.approx((50, nan, nan), nan_ok=True)
    assert node.page_cache_bytes == pytest.approx((nan, nan, 5), nan_ok=True)


@pytest.mark.parametrize('lines', [[], [sample(0, event='run_start', clock_s=0)], [sample(1, cpu_percent=1.0)]])
def test_a_file_without_samples_of_the_run_is_none(tmp_path, lines):
    assert read_node(write_node(tmp_path, 'n1', *lines)) is None


def test_the_report_draws_every_node(tmp_path):
    log = write_lines(tmp_path / 'result_0.txt', run_lines())
    assert read_telemetry(read_run(log)) == []
    for host in ('n1', 'n<2'):
        write_node(tmp_path, host, sample(0, event='run_start', clock_s=0.0),
                   *(sample(t, disk_read_bytes_per_s={'sda': 2e6 / t}) for t in (1, 2, 3)))
    assert [n.host for n in read_telemetry(read_run(log))] == ['n1', 'n<2']
    svg = next(render_svg(p) for p in draw_study(study_of(tmp_path)) if p.name == 'telemetry_0')
    assert 'n1: disk write' not in svg  # no sample tells of it
    assert 'n1: disk read, at most 2.0 MB/s' in svg and 'n&lt;2' in svg
