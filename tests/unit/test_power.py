"""Energy counters of processors, in made-up trees of /sys, and of GPUs of a stand-in for NVML."""

import sys

import pytest
from fake_nvml import FakeNvml
from helpers import RANGE_UJ, write_zone

from mlperf_rn50.system import power
from mlperf_rn50.system.power import EnergyCounter, Meter, open_gpu_energy, open_packages


def test_package_energy_is_counted_from_start_across_wraparound(power_zones):
    meter = Meter({'cpu': open_packages(power_zones, 0.0)})
    assert meter.read(0.0) == {'cpu': {'package-0': 0.0, 'package-1': 0.0}}
    first = write_zone(power_zones, 'intel-rapl:0', 'package-0', 65_000_000)
    write_zone(power_zones, 'intel-rapl:1', 'package-1', 9_000_000)
    assert meter.read(1.0) == {'cpu': {'package-0': 60.0, 'package-1': 10.0}}
    first.write_text('')  # temporarily unreadable
    assert meter.read(1.5) == {}
    first.write_text('4000000\n')  # almost a full wraparound
    assert meter.read(2.0)['cpu']['package-0'] == pytest.approx(60 - 61 + RANGE_UJ / 1e6)
    # A possible second wraparound loses all counters of that kind, permanently.
    assert [meter.read(t) for t in (265.0, 266.0)] == [{}, {}]


def test_counter_is_kept_for_a_gap_without_a_double_wraparound(power_zones):
    meter = Meter({'cpu': open_packages(power_zones, 0.0)})
    write_zone(power_zones, 'intel-rapl:0', 'package-0', 6_000_000)
    assert meter.read(130.0)['cpu']['package-0'] == 1.0


@pytest.mark.parametrize('name, text', [('energy_uj', ''), ('max_energy_range_uj', 'many')])
def test_unreadable_package_disables_cpu_energy(power_zones, name, text):
    (power_zones / 'class/powercap/intel-rapl:1' / name).write_text(text)
    assert open_packages(power_zones, 0.0) == []


def test_package_that_only_root_can_read_disables_cpu_energy(power_zones):
    path = power_zones / 'class/powercap/intel-rapl:1/energy_uj'
    path.unlink()
    path.mkdir()  # an OSError also for root
    assert open_packages(power_zones, 0.0) == []


def test_counter_without_range_stays_lost_after_a_decrease():
    values = iter((5.0, 7.0, 6.0, 9.0))
    meter = Meter({'gpu': [EnergyCounter('0', lambda: next(values), 0.0)]})
    assert [meter.read(t) for t in (1.0, 2.0, 3.0)] == [{'gpu': {'0': 2.0}}, {}, {}]


def test_power_is_integrated_between_close_readings():
    values = iter((100.0, 200.0, 200.0, 0.0))
    counter = power.PowerIntegral('0', lambda: next(values), 10.0)
    assert [counter.joules(t) for t in (11.0, 13.0)] == [150.0, 550.0]
    with pytest.raises(power.CounterLost):
        counter.joules(30.0)


def test_gpu_energy_is_counted_if_supported_else_integrated():
    meter = Meter({'gpu': open_gpu_energy(FakeNvml(counted='a'), 'ab', 0.0)})
    assert (meter.are_gpus_counted, meter.read(2.0)) == (False, {'gpu': {'0': 3.0, '1': 100.0}})
    assert Meter({'gpu': open_gpu_energy(FakeNvml(), 'ab', 0.0)}).are_gpus_counted
    # A GPU without either value disables GPU energy.
    assert open_gpu_energy(FakeNvml(counted='a', powered='a'), 'ab', 0.0) == []


def test_energy_facts_count_devices(power_zones, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNvml())
    assert power.energy_facts(power_zones) == {'cpu': 2, 'gpu': 3}
    (power_zones / 'class/powercap/intel-rapl:1/energy_uj').unlink()
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert power.energy_facts(power_zones) == {'cpu': 0, 'gpu': 0}
