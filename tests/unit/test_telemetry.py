"""Telemetry: samples of a node, energy counters, and reads of the files."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import wait_for, write_files
from lines import run_lines, write_lines
from made_systems import study_of

from mlperf_rn50.analysis.report.plots import draw_study
from mlperf_rn50.analysis.show.figure import render_svg
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.mllog.sidecar import node_telemetry as telemetry_files
from mlperf_rn50.mllog.sidecar.node_telemetry import read_node, read_telemetry
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import GpuSample
from mlperf_rn50.system import power, telemetry
from mlperf_rn50.system.power import (
    CounterLost,
    EnergyCounter,
    Meter,
    PowerIntegral,
    open_gpu_energy,
    open_packages,
)
from mlperf_rn50.system.telemetry import Telemetry, make_rates, read_counters, read_gpu


def test_rates_are_in_bytes_per_second():
    before = {'disk_read': {'a': 100, 'b': 50}, 'net_send': {'eth0': 0}, 'infiniband_send': {}}
    after = {
        'disk_read': {'a': 300, 'b': 40, 'new': 900},
        'net_send': {'eth0': 10},
        'infiniband_send': {},
    }
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


def write_node(folder, host, *lines):
    path = folder / f'telemetry_0_{host}.jsonl'
    path.write_text('\n'.join(lines) + '\n')
    return path


def test_samples_are_aligned_to_run_clock_and_invalid_lines_skipped(tmp_path):
    path = write_node(
        tmp_path,
        'n_1',
        sample(-3, event='start'),
        sample(-2, cpu_percent=1.0),
        sample(0, event='run_start', clock_s=0.0),
        sample(
            1,
            cpu_percent=50.0,
            disk_read_bytes_per_s={'sda': 7, 'sdb': 1},
            net_send_bytes_per_s={'lo': 100, 'eth0': 3},
            infiniband_send_bytes_per_s={'mlx5_0/1': 4},
        ),
        'not json',
        '[' * 100_000,
        '[]',
        '{"time_ms": "x"}',
        '{"time_ms": 1e400}',
        sample(1.5, cpu_percent='many'),
        sample(1.6, net_send_bytes_per_s={'eth0': -1}),
        sample(2, net_send_bytes_per_s={}),
        sample(60, event='run_start', clock_s=10.0),
        sample(61, page_cache_bytes=5),
    )
    node = read_node(path)
    assert node.host == 'n_1' and node.times_s == pytest.approx((1, 2, 11))
    nan = math.nan  # a missing value is not 0
    assert node.rates['disk read'] == pytest.approx((8, nan, nan), nan_ok=True)
    assert node.rates['network send'] == pytest.approx((7, nan, nan), nan_ok=True)
    assert node.cpu_percent == pytest.approx((50, nan, nan), nan_ok=True)
    assert node.page_cache_bytes == pytest.approx((nan, nan, 5), nan_ok=True)


@pytest.mark.parametrize(
    'lines', [[], [sample(0, event='run_start', clock_s=0)], [sample(1, cpu_percent=1.0)]]
)
def test_file_without_samples_of_run_yields_none(tmp_path, lines):
    assert read_node(write_node(tmp_path, 'n1', *lines)) is None


def test_report_draws_every_node(tmp_path):
    log = write_lines(tmp_path / 'result_0.txt', run_lines())
    assert read_telemetry(read_run(log)) == []
    for host in ('n1', 'n<2'):
        write_node(
            tmp_path,
            host,
            sample(0, event='run_start', clock_s=0.0),
            *(sample(t, disk_read_bytes_per_s={'sda': 2e6 / t}) for t in (1, 2, 3)),
        )
    assert [n.host for n in read_telemetry(read_run(log))] == ['n1', 'n<2']
    svg = next(render_svg(p) for p in draw_study(study_of(tmp_path)) if p.name == 'telemetry_0')
    assert 'n1: disk write' not in svg  # not in any sample
    assert 'n1: disk read, at most 2.0 MB/s' in svg and 'n&lt;2' in svg


# --- energy: fake /sys tree and fake NVML
# -----------------------------------------------------------------

RANGE_UJ = 262_143_328_850


def write_zone(sys_dir, zone, name, energy_uj):
    folder = sys_dir / 'class/powercap' / zone
    write_files(folder, {'name': name, 'energy_uj': energy_uj, 'max_energy_range_uj': RANGE_UJ})
    return folder / 'energy_uj'


@pytest.fixture
def node(tmp_path):
    """Tree of /sys with two packages, and with zones that must not be counted."""
    write_files(tmp_path, {'class/powercap/intel-rapl/enabled': 1})  # the control type
    first = write_zone(tmp_path, 'intel-rapl:0', 'package-0', 5_000_000)
    second = write_zone(tmp_path, 'intel-rapl:1', 'package-1', RANGE_UJ - 1_000_000)
    for zone, name in (
        ('intel-rapl:0:0', 'core'),
        ('intel-rapl:0:1', 'dram'),
        ('intel-rapl:2', 'psys'),
        ('intel-rapl-mmio:0', 'package-0'),
        ('dtpm:0', 'package-0'),
    ):
        write_zone(tmp_path, zone, name, 77_000_000)
    return SimpleNamespace(sys=tmp_path, first=first, second=second)


def test_package_energy_is_counted_from_start_across_wraparound(node):
    packages = open_packages(node.sys, 0.0)
    assert len(packages) == 2
    meter = Meter({'cpu': packages})
    assert meter.read(0.0) == {'cpu': {'package-0': 0.0, 'package-1': 0.0}}
    node.first.write_text('65000000\n')
    node.second.write_text('9000000\n')
    assert meter.read(1.0) == {'cpu': {'package-0': 60.0, 'package-1': 10.0}}
    node.first.write_text('')  # temporarily unreadable
    assert meter.read(1.5) == {}
    node.first.write_text('4000000\n')  # almost a full wraparound
    assert meter.read(2.0)['cpu']['package-0'] == pytest.approx(60 - 61 + RANGE_UJ / 1e6)


def test_possible_double_wraparound_loses_all_counters_of_that_kind(node):
    meter = Meter({'cpu': open_packages(node.sys, 0.0)})
    write_zone(node.sys, 'intel-rapl:0', 'package-0', 6_000_000)
    assert meter.read(130.0)['cpu']['package-0'] == 1.0
    assert [meter.read(t) for t in (262.0, 263.0)] == [{}, {}]  # permanently


@pytest.mark.parametrize(
    'break_package',
    [
        lambda node, _: node.second.unlink(),
        lambda node, _: node.second.write_text('many'),
        # readable by root only
        lambda _, m: m.setattr(power, '_microjoules', Mock(side_effect=PermissionError)),
    ],
)
def test_unreadable_package_disables_cpu_energy(node, monkeypatch, break_package):
    break_package(node, monkeypatch)
    assert open_packages(node.sys, 0.0) == []


def test_counter_without_range_stays_lost_after_a_decrease():
    values = iter((5.0, 7.0, 6.0, 9.0))
    meter = Meter({'gpu': [EnergyCounter('0', lambda: next(values), 0.0)]})
    assert [meter.read(t) for t in (1.0, 2.0, 3.0)] == [{'gpu': {'0': 2.0}}, {}, {}]


def test_power_is_integrated_between_close_readings():
    values = iter((100.0, 200.0, 200.0, 0.0))
    counter = PowerIntegral('0', lambda: next(values), 10.0)
    assert [counter.joules(t) for t in (11.0, 13.0)] == [150.0, 550.0]
    with pytest.raises(CounterLost):
        counter.joules(30.0)


def fake_nvml(counted=(0, 1), powered=(0, 1)):
    """Return an NVML with two GPUs, some with energy counters; 50 W each, and 3 J more at each
    reading."""
    millijoules = [10_000, 10_000]

    def refuse(*_):
        raise RuntimeError('Not Supported')

    def energy(handle):
        millijoules[handle] += 3000
        return millijoules[handle] if handle in counted else refuse()

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetPowerUsage=lambda handle: 50_000 if handle in powered else refuse(),
        nvmlDeviceGetUtilizationRates=refuse,  # as on a MIG device
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=10),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1400,
    )


def test_gpu_energy_is_counted_if_supported_else_integrated():
    meter = Meter({'gpu': open_gpu_energy(fake_nvml(counted=(0,)), [0, 1], 0.0)})
    assert (meter.are_gpus_counted, meter.read(2.0)) == (False, {'gpu': {'0': 3.0, '1': 100.0}})
    # A GPU without either value disables GPU energy.
    assert open_gpu_energy(fake_nvml(counted=(0,), powered=(0,)), [0, 1], 0.0) == []
    # Unsupported values are omitted from the sample.
    assert read_gpu(fake_nvml(), 0) == GpuSample(
        memory_used_bytes=10, power_w=50.0, sm_clock_mhz=1400
    )


def test_sampler_writes_energy_from_start_to_stop(node, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', fake_nvml())
    monkeypatch.setattr(telemetry, 'PERIOD_S', 0.01)
    monkeypatch.setattr(telemetry, 'SYS', node.sys)
    path = tmp_path / 'telemetry_0_n1.jsonl'
    sampler = Telemetry(path)
    sampler.run_start(0.0)
    wait_for(
        lambda: path.read_text().partition('run_start')[2].count('energy_j') >= 3,
        lambda: True,
        path.read_text,
    )
    sampler.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    [meter] = [r for r in lines if r.get('event') == 'meter']
    assert (
        meter['energy_j']['cpu'] == {'package-0': 0.0, 'package-1': 0.0}
        and meter['gpu_energy'] == 'counted'
    )
    assert lines[-1]['event'] == 'stop'
    joules = [r['energy_j']['gpu']['0'] for r in lines if 'energy_j' in r]
    assert (
        len(joules) >= 3
        and joules == sorted(joules)
        and joules[0] == 3.0
        and joules[-1] == 3.0 * len(joules)
    )
    sample = next(r for r in lines if 'cpu_percent' in r)
    assert {
        'time_ms',
        'memory_used_bytes',
        'page_cache_bytes',
        'net_send_bytes_per_s',
    } <= sample.keys()
    recorded = read_node(path)
    assert recorded.host == 'n1' and len(recorded.times_s) >= 2 and 0 <= recorded.times_s[0] < 30


def test_energy_facts_count_devices(node, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', fake_nvml())
    assert power.energy_facts(node.sys) == {'cpu': 2, 'gpu': 2}
    node.second.unlink()
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert power.energy_facts(node.sys) == {'cpu': 0, 'gpu': 0}


def test_samples_of_all_nodes_are_limited_in_total(tmp_path, monkeypatch):
    log = write_lines(tmp_path / 'result_0.txt', run_lines())
    lines = [
        sample(0, event='run_start', clock_s=0.0),
        *(sample(k, cpu_percent=1.0) for k in range(1, 101)),
    ]
    for host in ('n1', 'n2'):
        write_node(tmp_path, host, *lines)
    monkeypatch.setattr(telemetry_files, '_MAX_SAMPLES', 100)
    for node in read_telemetry(read_run(log)):
        assert 20 < len(node.times_s) <= 50 and node.times_s[0] == pytest.approx(1)
        assert node.times_s[-1] > 95
