"""System descriptions: fields of each round, their sources, and agreement with the logs."""

import json
from dataclasses import replace

import pytest
from helpers import write_files
from lines import run_lines, write_lines
from sample_log import ENV, SGD, write_five

from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.mllog.package.agreement import check_description, is_placeholder
from mlperf_rn50.mllog.package.machine_fields import machine_fields, memory_kind
from mlperf_rn50.mllog.package.system_desc import (
    describe,
    fields_of,
    find_base,
    load_described,
    missing_fields,
    render_status,
)

GPU = replace(SGD, train=replace(SGD.train, device='gpu'))
NAMES = {'org': 'us', 'system': 'box', 'round_name': 'v4.0'}


def lines_as_dict(text):
    """Return keys and values of lines such as 'key: value'."""
    return dict(line.strip().split(': ') for line in text.strip().splitlines())


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Runs on two nodes of four GPUs."""
    folder = write_five(tmp_path_factory.mktemp('gpu') / 'runs', GPU)
    return load_run_sets([folder])[0].runs


# --- fields


@pytest.mark.parametrize(
    'round_name, num_fields, num_required',
    [('v0.6', 40, 18), ('v0.7', 33, 19), ('v1.0', 34, 20), ('v2.0', 34, 20), ('v2.1', 35, 27)]
    + [('v4.0', 35, 27)],
)
def test_a_round_has_and_requires_the_fields_of_its_rules(round_name, num_fields, num_required):
    fields = fields_of(round_name)
    assert (len(fields), sum(fields.values())) == (num_fields, num_required)
    assert ('system_type' in fields) == (round_name >= 'v1.0')
    assert fields['host_networking'] == (round_name >= 'v2.1')


def test_required_fields_without_a_value_are_missing():
    content = dict.fromkeys(fields_of('v4.0'), 'x')
    assert missing_fields(content, 'v4.0') == []
    assert missing_fields(content | {'cooling': '', 'hw_notes': ''}, 'v4.0') == ['cooling']
    for empty in (None, '  ', [], [None], False):
        assert missing_fields(content | {'cooling': empty}, 'v4.0') == ['cooling']
    assert missing_fields(content | {'cooling': ''}, 'v2.0') == []
    assert missing_fields(content | {'other_software_stack': {}}, 'v4.0') == [
        'other_software_stack'
    ]
    # one of the two is enough
    cores = {'host_processor_core_count': '', 'host_processor_vcpu_count': '8'}
    assert missing_fields(content | cores, 'v4.0') == []
    assert len(missing_fields(content | dict.fromkeys(cores, ''), 'v4.0')) == 2
    # no accelerators
    gpu = {'accelerator_model_name': '', 'accelerator_memory_capacity': ''}
    assert missing_fields(content | gpu | {'accelerators_per_node': '0'}, 'v4.0') == []
    assert len(missing_fields(content | gpu, 'v4.0')) == 2
    assert missing_fields(content | cores | {'accelerators_per_node': '0'}, 'v4.0') == []


# --- facts of the machine


def test_description_of_the_machine_comes_from_the_logs_and_env_json(runs):
    built = describe(runs, ENV, **NAMES).fields
    expected = lines_as_dict("""
        number_of_nodes: 2
        accelerators_per_node: 4
        accelerator_model_name: V100
        accelerator_memory_configuration: HBM2
        accelerator_memory_capacity: 32510 MiB
        host_processors_per_node: 2
        host_processor_core_count: 20
        host_processor_vcpu_count: 40
        host_memory_capacity: 512 GB
        host_storage_type: 2x NVMe SSD
        host_storage_capacity: 2x 1600 GB
        host_networking: mlx5_0 100 Gb/sec
        operating_system: Debian GNU/Linux 12
        system_type: datacenter
        framework: MXNet 1.9.1 Gluon""")
    assert built | expected == built and [*built] == [*fields_of('v4.0')]


GPU_FACTS = {
    'name': 'NVIDIA H100 80GB HBM3',
    'driver_version': '535.1',
    'pcie.link.gen.max': '5',
    'pcie.link.width.max': '16',
    'fan.speed': '[N/A]',
}


def hardware_of(num_gpus, **facts):
    hardware = {'gpus': [GPU_FACTS] * num_gpus, **facts}
    return machine_fields({'host': {'hardware': hardware}}, 1, num_gpus)


def test_links_modules_and_cards_are_described():
    port = {'rate': '400 Gb/sec (4X NDR)', 'model': 'ConnectX-7'}
    fields = hardware_of(
        8,
        nvlinks={'num_links': 18, 'rate': '26.562 GB/s', 'pairs': {'NV18': 28}},
        dimms=[{'kind': 'DDR5', 'bytes': 64 << 30, 'speed': '4800 MT/s'}] * 32,
        networks=[
            {'name': 'eth0', 'rate': '10000 Mb/s', 'model': 'X550', 'address': '0000:01:00.0'},
            {'name': 'eth1', 'rate': None, 'model': 'X550', 'address': '0000:01:00.1'},
            {'name': 'ib0', 'rate': '400000 Mb/s', 'model': 'ConnectX-7', 'address': 'b:02:00.0'},
            {'name': 'mlx5_0', **port, 'address': 'b:02:00.0'},
            {'name': 'mlx5_1', **port, 'address': 'b:03:00.0'},
        ],
        storage=[{'kind': 'SSD', 'bytes': n} for n in (960 * 10**9, 5 * 10**8)],
    )
    expected = lines_as_dict("""
        accelerator_host_interconnect: PCIe 5.0 x16
        accelerator_interconnect: 18x 26.562 GB/s NVLink
        accelerator_interconnect_topology: NVSwitch
        accelerator_memory_configuration: HBM3
        host_memory_configuration: 32x 64 GB DDR5 4800 MT/s
        host_networking: X550 10 Gb/s + 2x ConnectX-7 400 Gb/sec (4X NDR)
        host_network_card_count: 1x X550 + 2x ConnectX-7
        host_storage_type: SSD
        host_storage_capacity: 960 GB""")
    assert fields | expected == fields
    assert fields['other_software_stack'] == {'cuda_driver_version': '535.1'}
    assert fields['cooling'] == ''


@pytest.mark.parametrize(
    'num_gpus, num_links, pairs, interconnect, topology',
    [
        (1, 0, {}, 'N/A', 'N/A'),
        (2, 0, {'PHB': 1}, 'PCIe 5.0 x16', ''),
        (2, 4, {'NV4': 1}, '4x 25 GB/s NVLink', 'Direct'),
        (4, 12, {'NV4': 6}, '12x 25 GB/s NVLink', 'Mesh'),
        (4, 12, {'NV12': 6}, '12x 25 GB/s NVLink', 'NVSwitch'),
        (8, 6, {'NV1': 8, 'NV2': 8, 'SYS': 12}, '6x 25 GB/s NVLink', ''),
        (2, 4, {}, '', ''),
    ],
)
def test_topology_follows_from_links_of_pairs(num_gpus, num_links, pairs, interconnect, topology):
    links = {'num_links': num_links, 'rate': '25 GB/s', 'pairs': pairs}
    fields = hardware_of(num_gpus, nvlinks=links)
    assert fields['accelerator_interconnect'] == interconnect
    assert fields['accelerator_interconnect_topology'] == topology


@pytest.mark.parametrize(
    'gpu, kind',
    [
        ('NVIDIA H100 80GB HBM3', 'HBM3'),
        ('NVIDIA H100 PCIe', 'HBM2e'),
        ('NVIDIA H100 NVL', 'HBM3'),
        ('NVIDIA H200', 'HBM3e'),
        ('NVIDIA A100-SXM4-40GB', 'HBM2'),
        ('NVIDIA A100-SXM4-80GB', 'HBM2e'),
        ('NVIDIA A100 80GB PCIe', 'HBM2e'),
        ('NVIDIA A30', 'HBM2'),
        ('Tesla V100-SXM2-16GB', 'HBM2'),
        ('NVIDIA L40S', 'GDDR6'),
        ('NVIDIA RTX A5000', 'GDDR6'),
        ('NVIDIA GeForce RTX 4090', 'GDDR6X'),
        ('AMD Instinct MI100X', ''),
    ],
)
def test_kind_of_memory_follows_from_the_name_of_the_gpu(gpu, kind):
    assert memory_kind(gpu) == kind


@pytest.mark.parametrize(
    'env',
    [
        {'host': 3, 'packages': [], 'libraries': 'x'},
        {'host': {'memory_bytes': 10**400}},
        {'host': {'hardware': {'cpu': [], 'storage': {}, 'gpus': [1], 'networks': 'x'}}},
        {'host': {'hardware': {'gpus': [{'name': 3}], 'dimms': [{'bytes': 'x'}], 'nvlinks': 7}}},
        {'host': {'hardware': {'nvlinks': {'num_links': '9', 'pairs': [1]}, 'gpus': [{}]}}},
    ],
)
def test_malformed_env_json_is_tolerated(runs, env):
    assert json.dumps(describe(runs, env, **NAMES).fields)


# --- submitted values


def test_submitted_values_survive_and_the_logs_count(runs, tmp_path):
    beside = {'host_memory_capacity': ' '} | lines_as_dict("""
        submitter: them
        division: closed
        number_of_nodes: 3
        cooling: Air
        host_networking_topology: N/A
        extra: x""")
    log = tmp_path / 'results/node/resnet/result_0.txt'
    write_files(tmp_path, {'systems/node.json': json.dumps(beside)})
    stack = [{'cuda': '12'}, 'gcc 5']
    given = {'cooling': 'water', 'other_software_stack': stack, 'system_name': 'Box (8x)'}
    write_files(tmp_path, {'given.json': json.dumps(given | {'accelerators_per_node': 9})})
    description = describe(
        runs,
        ENV,
        **NAMES,
        given=load_described(tmp_path / 'given.json'),
        base=find_base(log, 'v4.0'),
    )
    expected = given | lines_as_dict("""
        submitter: us
        division: open
        number_of_nodes: 2
        accelerators_per_node: 4
        host_networking_topology: N/A
        host_memory_capacity: 512 GB
        extra: x""")
    assert description.fields | expected == description.fields
    sources, *changes = description.notes
    assert 'from --describe: system_name, cooling, other_software_stack;' in sources
    assert 'from systems/node.json: host_networking_topology, extra;' in sources
    assert [c.partition(' is ')[0] for c in changes] == [
        'accelerators_per_node',
        'division',
        'number_of_nodes',
    ]


def test_unfilled_required_fields_are_a_skeleton_to_complete(runs):
    missing = missing_fields(describe(runs, ENV, **NAMES).fields, 'v4.0')
    assert 'cooling' in missing and 'sw_notes' not in missing
    given = dict.fromkeys(missing, 'N/A')
    assert missing_fields(describe(runs, ENV, **NAMES, given=given).fields, 'v4.0') == []


@pytest.mark.parametrize(
    'content, message',
    [
        ('{"coolin": "air"}', 'coolin: unknown field; did you mean cooling'),
        ('{"cooling": ', 'given.json: '),
        ('[]', 'is not a JSON object'),
        ('[' * 100_000, 'nested too deeply'),
        (None, 'No such file'),
    ],
)
def test_unusable_submitted_file_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / 'given.json').write_text(content)
    with pytest.raises(ConfigError, match=f'--describe: .*{message}'):
        load_described(tmp_path / 'given.json')


@pytest.mark.parametrize(
    'content', ['[]', '{"number_of_nodes": {"a": 1}, "sw_notes": {}, "division": 7}', '[' * 99_999]
)
def test_malformed_description_beside_the_logs_is_tolerated(runs, tmp_path, content):
    write_files(tmp_path, {'systems/node.json': content})
    base = find_base(tmp_path / 'results/node/resnet/result_0.txt', 'v4.0')
    assert (base is None) == content.startswith('[')
    assert describe(runs, {}, **NAMES, base=base).fields['division'] == 'open'


@pytest.mark.parametrize(
    'text, v05, v31, v40',
    [
        ('onprem', 'on-prem', 'onprem', 'Available on-premise'),
        ('Available on premise', 'on-prem', 'onprem', 'Available on-premise'),
        ('Available Cloud', 'cloud', 'cloud', 'Available cloud'),
        ('x', 'research', 'research', 'Research, Development, or Internal (RDI)'),
    ],
)
def test_status_is_in_the_words_of_the_round(text, v05, v31, v40):
    assert [render_status(text, r) for r in ('v0.5', 'v3.1', 'v4.0')] == [v05, v31, v40]


def test_entry_of_v05_follows_from_later_fields(runs):
    given = {'power': 'none', 'cpu_accel_interconnect': 'QPI'}
    fields = describe(runs, ENV, **NAMES | {'round_name': 'v0.5'}, given=given).fields
    assert [*fields] == [*fields_of('v0.5')]
    assert (fields['hardware'], fields['os'], fields['power']) == (
        'box',
        'Debian GNU/Linux 12',
        'none',
    )
    [node] = fields['nodes']
    expected = {'num_nodes': 2, 'cpu': '2x Xeon', 'num_cores': 40, 'num_vcpus': 80}
    expected |= {'accelerator': 'V100', 'num_accelerators': 4, 'cpu_accel_interconnect': 'QPI'}
    assert node | expected == node


# --- agreement


@pytest.fixture
def faults(tmp_path):
    """Function that returns (file, key) of the faults of a system with given logs and fields."""

    def check(described=None, round_name='v4.0', **logged):
        keys = {'number_of_nodes': 1, 'accelerators_per_node': 4, 'submission_status': 'onprem'}
        for k in range(2):
            values = {n: v[k] if isinstance(v, tuple) else v for n, v in (keys | logged).items()}
            write_lines(tmp_path / f'results/box/resnet/result_{k}.txt', run_lines(**values))
        content = dict.fromkeys(fields_of(round_name), 'x') | lines_as_dict("""
            submitter: us
            division: closed
            status: Available on-premise
            number_of_nodes: 1
            accelerators_per_node: 4
            host_processors_per_node: 2""")
        write_files(tmp_path, {'systems/box.json': json.dumps(content | (described or {}))})
        [run_set] = load_run_sets([tmp_path / 'results'])
        found, _ = check_description(tmp_path, 'box', round_name, run_set.runs)
        return [(fault.file, fault.key) for fault in found]

    return check


@pytest.mark.parametrize(
    'described',
    [
        {},
        {'submitter': 'US'},
        {'status': 'available'},
        {'status': 'onprem'},
        {'division': 'Closed'},
        {'cooling': 'N/A'},
    ],
)
def test_description_that_agrees_has_no_faults(faults, described):
    assert faults(described) == []


@pytest.mark.parametrize(
    'field, value',
    [
        ('submitter', 'us+them'),
        ('division', 'open'),
        ('status', 'Available cloud'),
        ('number_of_nodes', '2'),
        ('accelerators_per_node', '8'),
        ('host_processors_per_node', 'two'),
        ('cooling', ''),
        ('cooling', 'TODO'),
        ('number_of_nodes', '1.0'),
    ],
)
def test_description_against_the_logs_is_one_fault(faults, field, value):
    assert faults({field: value}) == [('systems/box.json', field)]


def test_platform_that_counts_other_nodes_is_a_fault(faults):
    assert faults(platform='2xbox') == [('systems/box.json', 'number_of_nodes')]
    assert faults(platform='4xH100') == []


@pytest.mark.parametrize(
    'logged, file, key',
    [
        ({'org': ('us', 'them')}, 'all 2 logs', 'submission_org'),
        ({'platform': ('box', 'bux')}, 'all 2 logs', 'submission_platform'),
        ({'submission_status': ('onprem', 'cloud')}, 'all 2 logs', 'submission_status'),
        ({'org': 'SUBMISSION_ORG_PLACEHOLDER'}, 'all 2 logs', 'submission_org'),
        ({'platform': 'unnamed'}, 'all 2 logs', 'submission_platform'),
    ],
)
def test_logs_against_one_another_and_placeholders_are_faults(faults, logged, file, key):
    assert faults(**logged) == [(file, key)]


def test_unreadable_description_is_the_only_fault(faults, tmp_path, runs):
    write_files(tmp_path, {'systems/box.json': '{'})
    found, missing = check_description(tmp_path, 'box', 'v4.0', runs)
    assert [(fault.file, fault.key) for fault in found] == [('systems/box.json', '')]
    assert missing == []


@pytest.mark.parametrize(
    'value, expected',
    [
        ('1xSUBMISSION_PLATFORM_PLACEHOLDER', True),
        ('TODO', True),
        ('<name>', True),
        ('Your organisation', True),
        ('N/A', False),
        ('Methodology', False),
        ('', False),
    ],
)
def test_placeholders_are_recognized(value, expected):
    assert is_placeholder(value) == expected
