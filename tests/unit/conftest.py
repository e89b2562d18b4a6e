"""Fixtures of the unit tests."""

import pytest
from helpers import RANGE_UJ, write_files, write_zone


@pytest.fixture
def thin_resnets(monkeypatch):
    """Build ResNets with a quarter of the channels, which takes a sixteenth of the memory and
    time."""
    from mlperf_rn50.model import resnet

    monkeypatch.setattr(resnet, 'STAGE_CHANNELS', (16, 32, 64, 128))


@pytest.fixture
def power_zones(tmp_path):
    """Tree of /sys with two packages, and with zones that must not be counted."""
    write_files(tmp_path, {'class/powercap/intel-rapl/enabled': 1})  # the control type
    write_zone(tmp_path, 'intel-rapl:0', 'package-0', 5_000_000)
    write_zone(tmp_path, 'intel-rapl:1', 'package-1', RANGE_UJ - 1_000_000)
    others = {
        'intel-rapl:0:0': 'core',
        'intel-rapl:0:1': 'dram',
        'intel-rapl:2': 'psys',
        'intel-rapl-mmio:0': 'package-0',
        'dtpm:0': 'package-0',
    }
    for zone, name in others.items():
        write_zone(tmp_path, zone, name, 77_000_000)
    return tmp_path
