"""The counters of energy of a node: a made-up /sys tree and a made-up NVML, through the sampler into its file."""
import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import wait_for, write_files
from lines import run_lines, write_lines

from mlperf_rn50.mlperf.energy import read_energy
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.system import power, telemetry
from mlperf_rn50.system.power import Integrated, Lost, Meter, Rising, energy_facts, open_gpu_energy, open_packages
from mlperf_rn50.system.telemetry import Telemetry, read_gpu

RANGE_UJ = 262_143_328_850


def write_zone(sys_dir, zone, name, energy_uj):
    folder = sys_dir / 'class/powercap' / zone
    write_files(folder, {'name': name, 'energy_uj': energy_uj, 'max_energy_range_uj': RANGE_UJ})
    return folder / 'energy_uj'


@pytest.fixture
def node(tmp_path):
    """Two packages, and the zones that must not be counted beside them."""
    write_files(tmp_path, {'class/powercap/intel-rapl/enabled': 1})  # the control type itself
    first = write_zone(tmp_path, 'intel-rapl:0', 'package-0', 5_000_000)
    second = write_zone(tmp_path, 'intel-rapl:1', 'package-1', RANGE_UJ - 1_000_000)
    for zone, name in (('intel-rapl:0:0', 'core'), ('intel-rapl:0:1', 'dram'), ('intel-rapl:2', 'psys'),
                       ('intel-rapl-mmio:0', 'package-0'), ('dtpm:0', 'package-0')):
        write_zone(tmp_path, zone, name, 77_000_000)
    return SimpleNamespace(sys=tmp_path, first=first, second=second)


def test_packages_are_counted_from_the_start_and_go_round(node):
    packages = open_packages(node.sys, 0.0)
    assert len(packages) == 2
    meter = Meter({'cpu': packages})
    assert meter.read(0.0) == {'cpu': {'package-0': 0.0, 'package-1': 0.0}}
    node.first.write_text('65000000\n')
    node.second.write_text('9000000\n')
    assert meter.read(1.0) == {'cpu': {'package-0': 60.0, 'package-1': 10.0}}
    node.first.write_text('')  # what cannot be read now is told later
    assert meter.read(1.5) == {}
    node.first.write_text('4000000\n')  # nearly once round
    assert meter.read(2.0)['cpu']['package-0'] == pytest.approx(60 - 61 + RANGE_UJ / 1e6)


def test_a_counter_that_may_have_gone_round_twice_is_lost_with_all_of_its_kind(node):
    meter = Meter({'cpu': open_packages(node.sys, 0.0)})
    write_zone(node.sys, 'intel-rapl:0', 'package-0', 6_000_000)
    assert meter.read(130.0)['cpu']['package-0'] == 1.0
    assert [meter.read(t) for t in (262.0, 263.0)] == [{}, {}]  # for good


@pytest.mark.parametrize('spoil', [
    lambda node, _: node.second.unlink(), lambda node, _: node.second.write_text('many'),
    lambda _, m: m.setattr(power, '_microjoules', Mock(side_effect=PermissionError))])  # counters for root alone
def test_a_package_that_cannot_be_read_leaves_no_sum_of_the_others(node, monkeypatch, spoil):
    spoil(node, monkeypatch)
    assert open_packages(node.sys, 0.0) == []


def test_a_counter_without_a_range_that_fell_is_told_no_more_when_it_rises():
    values = iter((5.0, 7.0, 6.0, 9.0))
    meter = Meter({'gpu': [Rising('0', lambda: next(values), 0.0)]})
    assert [meter.read(t) for t in (1.0, 2.0, 3.0)] == [{'gpu': {'0': 2.0}}, {}, {}]


def test_power_is_integrated_between_readings_that_lie_close():
    values = iter((100.0, 200.0, 200.0, 0.0))
    counter = Integrated('0', lambda: next(values), 10.0)
    assert [counter.joules(t) for t in (11.0, 13.0)] == [150.0, 550.0]
    with pytest.raises(Lost):
        counter.joules(30.0)


def fake_nvml(counted=(0, 1), powered=(0, 1)):
    """NVML of two GPUs, of which some have the counter of energy; 50 W each, and 3 J more at each look."""
    millijoules = [10_000, 10_000]

    def refuse(*_):
        raise RuntimeError('Not Supported')

    def energy(handle):
        millijoules[handle] += 3000
        return millijoules[handle] if handle in counted else refuse()
    return SimpleNamespace(
        NVML_CLOCK_SM=1, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetPowerUsage=lambda handle: 50_000 if handle in powered else refuse(),
        nvmlDeviceGetUtilizationRates=refuse,  # as of a divided GPU
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=10),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1400)


def test_gpus_are_counted_where_they_count_and_integrated_where_not():
    meter = Meter({'gpu': open_gpu_energy(fake_nvml(counted=(0,)), [0, 1], 0.0)})
    assert (meter.are_gpus_counted, meter.read(2.0)) == (False, {'gpu': {'0': 3.0, '1': 100.0}})
    # One that tells neither leaves no sum of the others.
    assert open_gpu_energy(fake_nvml(counted=(0,), powered=(0,)), [0, 1], 0.0) == []
    # What a GPU does not tell is left out of its sample.
    assert read_gpu(fake_nvml(), 0) == {'memory_used_bytes': 10, 'power_w': 50.0, 'sm_clock_mhz': 1400}


def test_the_sampler_writes_joules_from_its_start_to_its_end(node, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', fake_nvml())
    monkeypatch.setattr(telemetry, 'PERIOD_S', 0.01)
    monkeypatch.setattr(telemetry, 'SYS', node.sys)
    path = tmp_path / 'telemetry_0_n1.jsonl'
    sampler = Telemetry(path)
    sampler.run_start(0.0)
    wait_for(lambda: path.read_text().count('energy_j') >= 3, lambda: True, path.read_text, pause_s=0.01)
    sampler.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    [meter] = [r for r in lines if r.get('event') == 'meter']
    assert meter['energy_j']['cpu'] == {'package-0': 0.0, 'package-1': 0.0} and meter['gpu_energy'] == 'counted'
    assert lines[-1]['event'] == 'stop'
    told = [r['energy_j']['gpu']['0'] for r in lines if 'energy_j' in r]
    assert len(told) >= 3 and told == sorted(told) and told[0] == 3.0 and told[-1] == 3.0 * len(told)
    # A second a line, and the meter before the run: the clock of this test tells nothing of a power.
    first = ['start', 'meter', 'run_start']
    ordered = sorted(lines, key=lambda r: first.index(r['event']) if r.get('event') in first else len(first))
    write_lines(path, [json.dumps({**record, 'time_ms': 1000 * i}) for i, record in enumerate(ordered)])
    run = read_run(write_lines(tmp_path / 'result_0.txt', run_lines(ranks=1, accelerators=False)))
    found = read_energy(run, until_s=float(len(lines) - len(first)))
    assert 3 <= found.gpu_joules / 2 <= told[-1] and found.nodes['n1']['gpu'].keys() == {'0', '1'}
    assert found.cpu_joules is None and found.reasons['cpu'] == 'n1, cpu package-0: its counter stands still'


def test_facts_count_the_devices(node, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', fake_nvml())
    assert energy_facts(node.sys) == {'cpu': 2, 'gpu': 2}
    node.second.unlink()
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert energy_facts(node.sys) == {'cpu': 0, 'gpu': 0}
