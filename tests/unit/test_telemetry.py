"""Telemetry: samples of a node, and reads of the files."""

import json
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from helpers import json_table, wait_for, write_files
from lines import run_lines, write_lines
from made_systems import study_of

from mlperf_rn50.analysis.report.plots import draw_study
from mlperf_rn50.analysis.show.figure import render_svg
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.mllog.sidecar import node_telemetry as telemetry_files
from mlperf_rn50.mllog.sidecar.node_telemetry import read_node, read_telemetry
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import GpuSample
from mlperf_rn50.system import telemetry
from mlperf_rn50.system.telemetry import Telemetry, make_rates, read_counters, read_gpu


def test_rates_are_in_bytes_per_second():
    before = {'disk_read': {'a': 100, 'b': 50}, 'net_send': {'eth0': 0}, 'infiniband_send': {}}
    after = {**before, 'disk_read': {'a': 300, 'b': 40, 'new': 900}, 'net_send': {'eth0': 10}}
    assert make_rates(before, after, 2.0) == {
        'disk_read_bytes_per_s': {'a': 100, 'b': 0, 'new': 0},
        'net_send_bytes_per_s': {'eth0': 5},
    }


def test_infiniband_counters_count_four_byte_words(tmp_path):
    write_files(tmp_path, {'class/infiniband/mlx5_0/ports/1/counters/port_rcv_data': 1000})
    counters = read_counters(tmp_path)
    assert counters['infiniband_receive'] == {'mlx5_0/1': 4000}
    assert counters['infiniband_send'] == {}  # unreadable, not 0
    assert counters['disk_read'] == {}  # no hardware block device in this tree
    assert 'lo' in counters['net_send']


def test_host_names_become_valid_file_names():
    assert RunFolder(Path(), 2).telemetry('../n1 x') == Path('telemetry_2_.._n1_x.jsonl')


def sample(time_s, **values):
    return json.dumps({'time_ms': round(1000 * (5000 + time_s)), **values})


START = sample(0, event='run_start', clock_s=0.0)


def write_node(folder, host, *lines):
    path = folder / f'telemetry_0_{host}.jsonl'
    path.write_text('\n'.join(lines) + '\n')
    return path


@pytest.mark.parametrize('lines', [[], [START], [sample(1, cpu_percent=1.0)]])
def test_file_without_samples_of_run_yields_none(tmp_path, lines):
    assert read_node(write_node(tmp_path, 'n1', *lines)) is None


def test_report_draws_every_node(tmp_path):
    log = write_lines(tmp_path / 'result_0.txt', run_lines())
    assert read_telemetry(read_run(log)) == []
    samples = [sample(t, disk_read_bytes_per_s={'sda': 2e6 / t}) for t in (1, 2, 3)]
    for host in ('n1', 'n<2'):
        write_node(tmp_path, host, START, *samples)
    assert [n.host for n in read_telemetry(read_run(log))] == ['n1', 'n<2']
    svg = next(render_svg(p) for p in draw_study(study_of(tmp_path)) if p.name == 'telemetry_0')
    assert 'n1: disk write' not in svg  # not in any sample
    assert 'n1: disk read, at most 2.0 MB/s' in svg and 'n&lt;2' in svg


def test_unsupported_values_are_omitted_from_the_sample():
    expected = GpuSample(memory_used_bytes=10, power_w=50.0, sm_clock_mhz=1400)
    assert read_gpu(FakeNvml(), 'a') == expected


def test_sampler_writes_energy_from_start_to_stop(power_zones, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNvml())
    monkeypatch.setattr(telemetry, 'PERIOD_S', 0.01)
    monkeypatch.setattr(telemetry, 'SYS', power_zones)
    path = tmp_path / 'telemetry_0_n1.jsonl'
    sampler = Telemetry(path)
    sampler.run_start(0.0)

    def is_sampled():
        return path.read_text().partition('run_start')[2].count('energy_j') >= 3

    wait_for(is_sampled, lambda: True, path.read_text)
    sampler.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    [meter] = [r for r in lines if r.get('event') == 'meter']
    assert meter['energy_j']['cpu'] == {'package-0': 0.0, 'package-1': 0.0}
    assert (meter['gpu_energy'], lines[-1]['event']) == ('counted', 'stop')
    joules = [r['energy_j']['gpu']['0'] for r in lines if 'energy_j' in r]
    assert len(joules) >= 3 and joules == [3.0 * (i + 1) for i in range(len(joules))]
    sample = next(r for r in lines if 'cpu_percent' in r)
    names = 'time_ms memory_used_bytes page_cache_bytes net_send_bytes_per_s'
    assert set(names.split()) <= set(sample)
    recorded = read_node(path)
    assert recorded.host == 'n1' and len(recorded.times_s) >= 2 and 0 <= recorded.times_s[0] < 30


@pytest.mark.parametrize(
    'num_used, num_cards, is_metered',
    json_table("""
4 | 4 | false  # one GPU per task, so this rank can open only some of them
1 | 4 | true
7 | 1 | true  # instances of one card
4 | 0 | true  # unknown number of cards
"""),
)
def test_partly_visible_gpus_of_a_node_are_not_metered(
    monkeypatch, tmp_path, num_used, num_cards, is_metered
):
    for number in range(num_cards):
        card = tmp_path / f'bus/pci/devices/0000:{number}b:00.0'
        write_files(card, {'vendor': '0x10de', 'class': '0x030200'})
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNvml(num_cards=1))
    monkeypatch.setattr(telemetry, 'SYS', tmp_path)
    Telemetry(path := tmp_path / 'telemetry_0_n1.jsonl', num_used).close()
    assert ('gpu_energy' in path.read_text()) == is_metered


def test_samples_of_all_nodes_are_limited_in_total(tmp_path, monkeypatch):
    log = write_lines(tmp_path / 'result_0.txt', run_lines())
    for host in ('n1', 'n2'):
        write_node(tmp_path, host, START, *(sample(k, cpu_percent=1.0) for k in range(1, 101)))
    monkeypatch.setattr(telemetry_files, '_MAX_SAMPLES', 100)
    for node in read_telemetry(read_run(log)):
        assert 20 < len(node.times_s) <= 50 and node.times_s[0] == pytest.approx(1)
        assert node.times_s[-1] > 95
