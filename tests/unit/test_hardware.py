"""What a host is made of, from what Linux prints of it."""
import json

from mlperf_rn50.system.environment import find_hardware, find_networks, parse_cpu, parse_storage, query_gpus


def test_lscpu():
    fields = {'Model name:': 'Xeon 8174', 'Socket(s):': '2', 'Core(s) per socket:': '24', 'Thread(s) per core:': '2',
              'CPU max MHz:': '3900.0000', 'L1d cache:': '1.5 MiB (48 instances)', 'L3 cache:': '66 MiB (2 instances)'}
    text = json.dumps({'lscpu': [{'field': k, 'data': v} for k, v in fields.items()]})
    assert parse_cpu(text) == {'model': 'Xeon 8174', 'sockets': 2, 'cores_per_socket': 24, 'threads_per_core': 2,
                               'max_mhz': 3900.0, 'caches': 'L1d 1.5 MiB (48 instances), L3 66 MiB (2 instances)'}


def test_without_the_programs_nothing_is_known():
    for text in ('', '[]', '{}'):
        assert parse_storage(text) == [] and set(parse_cpu(text).values()) == {None}


def test_lsblk():
    text = json.dumps({'blockdevices': [
        {'name': 'nvme0n1', 'type': 'disk', 'size': 1920, 'rota': False, 'tran': 'nvme', 'model': 'PM9A3 '},
        {'name': 'sda', 'type': 'disk', 'size': 8000, 'rota': True, 'tran': 'sata', 'model': None},
        {'name': 'sdb', 'type': 'disk', 'size': 960, 'rota': False, 'tran': 'sata', 'model': 'S4510'},
        {'name': 'vda', 'type': 'disk', 'size': 100, 'rota': True, 'tran': None, 'model': None},
        {'name': 'zram0', 'type': 'disk', 'size': 0}, {'name': 'loop0', 'type': 'loop', 'size': 5}]})
    assert [(d['kind'], d['model'], d['bytes']) for d in parse_storage(text)] == [
        ('NVMe SSD', 'PM9A3', 1920), ('HDD', None, 8000), ('SSD', 'S4510', 960), ('virtual disk', None, 100)]


def test_networks(tmp_path):
    for name, speed in (('eth0', '25000'), ('eth1', '-1'), ('lo', None)):
        (tmp_path / 'class/net' / name).mkdir(parents=True)
        if speed:
            (tmp_path / 'class/net' / name / 'device').mkdir()
            (tmp_path / 'class/net' / name / 'speed').write_text(speed + '\n')
    port = tmp_path / 'class/infiniband/mlx5_0/ports/1'
    port.mkdir(parents=True)
    (port / 'rate').write_text('100 Gb/sec (4X EDR)\n')
    assert find_networks(tmp_path) == [{'name': 'eth0', 'rate': '25000 Mb/s'}, {'name': 'eth1', 'rate': None},
                                       {'name': 'mlx5_0', 'rate': '100 Gb/sec (4X EDR)'}]


def test_this_machine_has_a_processor_and_memory():
    found = find_hardware()
    assert found['cpu']['sockets'] >= 1 and found['memory_bytes'] > 2**28


def test_a_driver_that_prints_no_text_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / 'nvidia-smi').write_text("#!/bin/sh\nprintf '\\377\\376, 3\\n'\n")
    (tmp_path / 'nvidia-smi').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    assert query_gpus('name', 'uuid') == [{'name': '\ufffd\ufffd', 'uuid': '3'}]
