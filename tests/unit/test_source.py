"""Sources of predictions: logs, published systems, and untrusted bench files."""

import json
import re
from dataclasses import replace

import pytest
from benches import bench_allreduce, bench_train
from helpers import json_table, table, values, write_files
from lines import complete, run_lines, write_lines, write_set
from made_systems import write_layouts
from pytest import approx

from mlperf_rn50.analysis.predict.source import change, load_source, parse_what_if
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mllog.read.description import network_gbit_s

A100 = 'dgxa100_ngc20.06_mxnet'


@pytest.fixture
def dump(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_published_system_is_found_by_name_or_its_last_part():
    source = load_source([f'V0.7/nvidia/{A100}'])
    assert source.base == load_source([A100]).base and source.link.gbit_s == 1600
    assert [k.num_nodes for k in source.sets] == [1, 2, 96]  # of the same machine


def test_unknown_name_cannot_control_the_terminal():
    with pytest.raises(ConfigError, match=r'a\?\[31mb: not a file, folder or published system'):
        load_source(['a\x1b[31mb'])


def test_fewer_ranks_than_nodes_are_no_base(tmp_path):
    lines = complete(run_lines(nodes=4, ranks=1, accelerators=False))
    write_lines(tmp_path / 'result_0.txt', lines)
    with pytest.raises(UserError, match='no set to predict from'):
        load_source([str(tmp_path)])


def test_base_has_the_fewest_nodes_and_a_matching_layout(tmp_path):
    study = [str(tmp_path)]
    for nodes in (4, 1, 2):
        write_layouts(tmp_path, {f'{nodes}x4': 10.0}, is_complete=True, batch=64 * nodes)
    source = load_source(study)
    assert source.base.name == '1x4' and [k.name for k in source.sets] == ['1x4', '2x4', '4x4']
    assert source.notes[0].startswith('Predicted from 1x4, the smallest of 3 systems; --system')
    assert load_source(study, '2x4').base.num_nodes == 2
    write_layouts(tmp_path, {'1x2': 10.0}, is_complete=True)
    assert load_source(study, per_node=2).base.name == '1x2'
    with pytest.raises(ConfigError, match='no name, which matches 2 .* expected one of 1x2, 1x4$'):
        load_source(study, per_node=8)
    with pytest.raises(ConfigError, match='expected one run, study, published system'):
        load_source([str(tmp_path / '1x4'), str(tmp_path / '2x4')])


def test_systems_of_equal_names_are_selected_by_the_names_in_the_message(tmp_path):
    for folder in 'ab':
        write_layouts(tmp_path / folder, {'1x4': 10.0}, is_complete=True)
    with pytest.raises(ConfigError, match='matches 2 systems') as caught:
        load_source([str(tmp_path)])
    names = re.findall(r'1x4 \(.+?\)', str(caught.value))
    found = [load_source([str(tmp_path)], name).base for name in names]
    assert [f'{b.name} ({b.source})' for b in found] == names and len(set(names)) == 2


def test_changed_link_exchanges_the_same_gradients(tmp_path):
    folder = write_layouts(tmp_path, {'1x2': 10.0}, is_complete=True)
    write_files(folder / '1x2', {'config.yaml': config_text('resnet18', 1000)})
    source = load_source([str(folder)])
    link = change(source, parse_what_if('link=25 ports=2')).link
    assert (link.gbit_s, link.source) == (50, '--what-if')
    assert replace(link, gbit_s=None, source='unknown') == source.link


def test_other_batches_on_the_nodes_of_the_base_are_further_steps(tmp_path):
    for name, nodes, batch in (('base', 1, 64), ('b', 1, 256), ('near', 1, 66), ('two', 2, 512)):
        write_set(tmp_path / name, 1, True, nodes=nodes, ranks=4 * nodes, batch=batch)
    base = load_source([str(tmp_path)], 'base').base
    assert base.steps == {64.0: approx(10.0 * 256 / 1_281_167)}


def test_sets_of_another_network_are_not_compared(tmp_path):
    for name, network, batch in (('a', 'resnet50', 64), ('b', 'resnet18', 256)):
        folder = write_set(tmp_path / name, 1, True, nodes=1, ranks=4, batch=batch)
        write_files(folder, {'config.yaml': config_text(network, 1000)})
    source = load_source([str(tmp_path)], 'a')
    assert (source.base.steps, [k.name for k in source.sets]) == ({}, ['a'])


@pytest.mark.parametrize(
    'keys, reason',
    [
        ({'division': 'open', 'status': 'aborted', 'accuracies': (0.1,)}, 'no run has finished'),
        ({'batch': lambda k: 64 << k}, 'global_batch_size is 64'),
    ],
)
def test_unusable_set_is_refused_with_its_reason(tmp_path, keys, reason):
    folder = write_set(tmp_path / 'run', 2, True, **keys)
    with pytest.raises(UserError, match=f'no set to predict from: run: {reason}'):
        load_source([str(folder)])


# the step alone takes 300 ms, the exchange 800 ms
@pytest.mark.parametrize(
    'step_ms, overlap, extra_s',
    json_table("""
1000.0 | 0.125 | 0.0
700.0  | 0.5   | 0.0
1200.0 | 0.0   | 0.1
200.0  | 1.0   | 0.0
"""),
)
def test_step_and_exchange_come_from_bench_files(dump, step_ms, overlap, extra_s):
    source = load_source(
        [dump('a.json', bench_train()), dump('b.json', bench_allreduce(step_ms=step_ms))]
    )
    base, link = source.base, source.link
    assert (base.step_s, base.global_batch_size, base.dataset) == (0.3, 32, None)
    assert (base.num_nodes, base.num_units, base.has_accelerators) == (1, 1, False)
    assert base.evaluation_s == approx(0.1 * 50_000 / 32)
    assert link.gbit_s == approx(1.0)  # 100 MB in 800 ms over 2 ranks
    assert (link.overlap, link.extra_s) == (approx(overlap), approx(extra_s))
    assert 'over 2 ranks on 2 nodes' in link.source


@pytest.mark.parametrize('images, step_s', [('synthetic', 0.3), ('real', 0.4)])
def test_step_with_real_images_has_the_mean_time_as_its_images_per_second(dump, images, step_s):
    row = {'input': images, 'images_per_s': 80.0}
    assert load_source([dump('a.json', bench_train(row))]).base.step_s == approx(step_s)


def test_requested_link_takes_precedence_and_the_source_has_the_bytes(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce())
    small = dump('c.json', bench_train({'precision': 'float16', 'num_parameters': 1000}))
    for words, num_bytes in (
        ([step, exchange], 102_228_128),
        ([step], 102_228_128),
        ([small], 2000),
        ([A100], 51_000_000),
    ):
        link = load_source(words, gbit_s=25.0).link
        assert (link.gbit_s, link.exchange_bytes, link.source) == (25.0, num_bytes, '--link-gbit-s')
    source = load_source([A100, exchange])
    link = source.link
    assert (link.gbit_s, link.exchange_bytes, link.extra_s) == (1.0, 51_000_000, None)
    assert 'only the rate is used' in source.notes[-1]
    gpu = load_source([dump('d.json', bench_train(gpus=['A100']))])
    assert (gpu.link.gbit_s, gpu.base.generation) == (None, 'A100')


@pytest.mark.parametrize(
    'row',
    table("""
num_ranks=4
num_ranks=2 num_hosts=2
model="vgg16"
precision="float16"
input="real"
num_parameters=5
local_batch_size=32
"""),
)
def test_bench_rows_may_differ_only_in_the_batch(dump, row):
    content = bench_train({}, {'local_batch_size': 64, **values(*row)})
    content['tables'].append({'title': 'Scaling', 'rows': [{'efficiency': 1.0}]})
    with pytest.raises(ConfigError, match='got resnet50, .*, 32 per rank, .* differ only in'):
        load_source([dump('a.json', content)])


def test_bench_of_other_images_has_only_the_step_time(dump):
    base = load_source([dump('a.json', bench_train({'num_ranks': 4, 'image_size': 32}))]).base
    assert (base.num_units, base.dataset, base.evaluation_s) == (4, 'images of 32 pixels', None)


ROW, GRADIENTS = ('tables', 0, 'rows', 0), ('tables', 1, 'rows', 0)


def altered(*path, value):
    """Return the content of a bench file with the value at a path replaced."""
    content = place = bench_train() if path[:2] == ROW[:2] else bench_allreduce()
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


@pytest.mark.parametrize(
    'content, message',
    [
        ('', 'Input data was truncated'),
        ('[]', 'Expected `object`, got `array`'),
        ('{"a": ' * 100_000, 'recursion'),
        ('{"format": "\x1b[2J"}', 'JSON is malformed'),
        (' ' * 5_000_000, 'is larger than 4194304 bytes'),
        (bench_allreduce(4, 1), 'num_hosts'),
        (bench_allreduce(3, 2), 'num_hosts'),
        (altered(*ROW[:3], value=[{}] * 1001), 'rows'),
        *(
            (altered(*path, value=value), path[-1])
            for path, value in json_table(r"""
["format"]                           | "mlperf-rn50 bench data 1"
["tables"]                           | []
["machine", "gpus"]                  | "A100"
["tables", 1, "rows", 0, "num_hosts"] | 3
["tables", 1, "rows", 0, "bytes"]    | 1e300
["tables", 1, "rows", 0, "time_ms"]  | 0
["tables", 0, "rows", 0, "model"]    | "\u009b2J\u202e"
["tables", 0, "rows", 0, "step_ms"]  | 1e308
["tables", 0, "rows", 0, "step_ms"]  | 0
["tables", 0, "rows", 0, "step_ms"]  | "300"
["tables", 0, "rows", 0, "num_hosts"] | 2
["tables", 0, "rows", 0, "local_batch_size"] | -32
""")
        ),
    ],
)
def test_invalid_bench_file_is_a_one_line_error_with_the_location(dump, content, message):
    with pytest.raises(UserError) as e:
        load_source([dump('a.json', content)])
    text = str(e.value)
    assert message in text and '.json: ' in text and text.isprintable() and len(text) < 400


def config_text(name='resnet18', classes=10, precision='float32', comm='none', size=8):
    return f"""
        data: {{num_classes: {classes}}}
        model: {{name: {name}}}
        comm: {{compression: {comm}}}
        train: {{local_batch_size: {size}, precision: {precision}, device: gpu}}"""


NETWORK = """{"event": "network", "local_batch_size": 1, "flops_per_image": 1,
    "gradient_bytes": 7000000, "num_buckets": 1}""".replace('\n', '')


# config: arguments of config_text, or the whole text
@pytest.mark.parametrize(
    'config, has_network, megabytes, text',
    json_table("""
[]                               | false | 44.7  | "resnet18 with 10 classes"
["resnet50", 10, "float32", "fp16"] | false | 47.1 | "resnet50 with 10 classes"
["vgg16", 1000, "float16"]       | false | 276.7 | "vgg16 with 1,000 classes"
[]                               | true  | 7.0   | "metrics.jsonl"
""                               | true  | 7.0   | "metrics.jsonl"
""                               | false | 102.2 | "ResNet-50 assumed"
"model: ["                       | false | 102.2 | "ResNet-50 assumed"
["other"]                        | false | 102.2 | "ResNet-50 assumed"
["resnet18", -5]                 | false | 102.2 | "ResNet-50 assumed"
"""),
)
def test_exchanged_bytes_are_those_of_the_network_of_the_run(
    tmp_path, config, has_network, megabytes, text
):
    facts = {'division': 'open', 'dataset': 'digits', 'train_samples': 1000, 'target': 0.7}
    folder = write_set(tmp_path / 'run', 1, True, accelerators=False, ranks=2, **facts)
    config = config if isinstance(config, str) else config_text(*config)
    files = {'config.yaml': config, 'metrics.jsonl': NETWORK if has_network else ''}
    write_files(folder, files)
    link = load_source([str(folder)]).link
    assert (link.exchange_bytes / 1e6, link.network) == (approx(megabytes, abs=0.05), text)


@pytest.mark.parametrize(
    'text, gbit_s',
    json_table("""
"Storage: 2x IB HDR 200Gb/sec, Management: 1x 100Gb/Sec, Compute: 8x HDR 200Gb/Sec" | 1600
"2x Mellanox ConnectX-6, 100Gb/s Ethernet"                                          | 100
"Intel X710 2x10GbE SFP+, ConnectX-6 HDR100/100GbE"                                 | 100
"1x Ethernet 80Gb/Sec, 8x NVIDIA NDR (400Gb/s)"                                     | 3200
"BF3 200Gbps for NS and 2xBF3 400Gbps for EW"                                       | 800
"PCIe: 504 GB/s; NIC: 500 GB/s"                                                     | 4032
"Compute: 4 x ConnectX-6 HDR 200 Gb/Sec +  Management: 4 x 1Gb"                     | 800
"Management: 1x Ethernet 10GB/Sec"                                                  | null
"Infiniband"                                                                        | null
7                                                                                   | null
"""),
)
def test_rate_of_all_ports_comes_from_the_system_description(text, gbit_s):
    assert network_gbit_s(text) == gbit_s
