"""What a prediction starts from: runs, studies, published systems, and files of benches that nobody may trust."""
import json
from dataclasses import replace

import pytest
from benches import bench_allreduce, bench_train
from lines import run_lines, write_lines, write_set

from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mlperf.energy import Energy
from mlperf_rn50.study.predict import published_link, ring_s
from mlperf_rn50.study.predict_sources import Power, find_published, full_name, load_source


@pytest.fixture
def dump(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)
    return write


def test_a_published_system_by_its_name_or_the_last_part_of_it():
    source = load_source(['V0.7/nvidia/dgxa100_ngc20.06_mxnet'])
    assert source.base == load_source(['dgxa100_ngc20.06_mxnet']).base and source.link == published_link()
    assert (source.base.num_nodes, source.base.num_units, source.base.global_batch_size) == (1, 8, 3264)
    assert [k.num_nodes for k in source.sets] == [1, 2, 96]  # what the validation pairs with it


def test_names_of_published_systems_are_unique():
    from mlperf_rn50.study.known import load_published
    assert all(find_published(full_name(s)) is s for s in load_published())


@pytest.mark.parametrize('name, said', [
    ('dgxa100_ngc20.06_mxnte', 'did you mean v0.7/NVIDIA/dgxa100_ngc20.06_mxnet?'),
    ('v0.7/NVIDIA/dgxa100_ngc20.06', 'did you mean v0.7/NVIDIA/dgxa100_ngc20.06_mxnet?'),
    ('logs/none', 'logs/none: neither a file or folder nor a published system; expected a run'),
    ('a\x1b[31mb', 'a?[31mb: neither')])
def test_an_unknown_name_is_one_line_with_the_nearest(name, said):
    with pytest.raises(ConfigError) as e:
        load_source([name])
    assert said in str(e.value) and '\n' not in str(e.value)


def test_a_name_that_several_have_is_not_guessed(monkeypatch):
    from mlperf_rn50.study import predict_sources
    two = [replace(find_published('DSS8440'), round=name) for name in ('v0.7', 'v1.0')]
    monkeypatch.setattr(predict_sources, 'load_published', lambda: two)
    with pytest.raises(ConfigError, match='names 2 published systems, expected one of v0.7/DellEMC/DSS8440, v1.0/'):
        load_source(['DSS8440'])


def test_the_fewest_nodes_of_a_study_are_the_base(tmp_path):
    for nodes in (4, 1, 2):
        write_set(tmp_path / f'{nodes}x4', 2, nodes=nodes, ranks=4 * nodes, batch=64 * nodes)
    source = load_source([str(tmp_path)])
    assert source.base.name == '1x4' and [k.name for k in source.sets] == ['1x4', '2x4', '4x4']
    assert source.notes[0] == '1x4 of 3 systems is started from: it has the fewest nodes'
    assert load_source([str(tmp_path)], '2x4').base.num_nodes == 2
    with pytest.raises(ConfigError, match='--system: got 2x3, expected one of 1x4, 2x4, 4x4; did you mean 2x4?'):
        load_source([str(tmp_path)], '2x3')


def test_of_several_so_small_the_layout_decides_or_nobody(tmp_path):
    for ranks in (2, 4):
        write_set(tmp_path / f'1x{ranks}', 2, ranks=ranks)
    assert load_source([str(tmp_path)], per_node=2).base.name == '1x2'
    with pytest.raises(ConfigError, match='--system: 2 systems could be started from, expected one: 1x2, 1x4'):
        load_source([str(tmp_path)], per_node=8)


def test_a_set_without_times_or_that_is_none_says_why(tmp_path):
    write_set(tmp_path / 'short', 2, status='aborted', accuracies=(0.1,))
    with pytest.raises(UserError, match='nothing to start from: short: its logs do not tell'):
        load_source([str(tmp_path / 'short')])
    for k, batch in enumerate((64, 128)):
        write_lines(tmp_path / f'mixed/result_{k}.txt', run_lines(batch=batch))
    with pytest.raises(UserError, match='nothing to start from: mixed: global_batch_size is 64'):
        load_source([str(tmp_path / 'mixed')])


def test_a_step_of_one_rank_and_the_exchange_of_several(dump):
    source = load_source([dump('a.json', bench_train()), dump('b.json', bench_allreduce())])
    base, link = source.base, source.link
    assert (base.step_s, base.exchange_s, base.global_batch_size, base.dataset) == (0.3, 0.0, 32, None)
    assert (base.num_nodes, base.num_units, base.has_accelerators) == (1, 1, False)
    assert base.evaluation_s == pytest.approx(0.1 * 50_000 / 32)
    assert ring_s(link.exchange_bytes, 2, link.gbit_s) == pytest.approx(0.8)  # what was measured
    assert not link.is_hidden and 'over 2 ranks on 2 nodes' in link.source and 'shows 700.0' in link.source


@pytest.mark.parametrize('step_ms, is_hidden', [(650.0, True), (750.0, False), (None, False)])
def test_the_step_with_the_exchange_tells_whether_it_is_hidden(dump, step_ms, is_hidden):
    exchange = bench_allreduce(step_ms=step_ms)
    if step_ms is None:
        del exchange['tables'][1]['rows'][0]['step_ms']
    source = load_source([dump('a.json', bench_train()), dump('b.json', exchange)])
    assert source.link.is_hidden == is_hidden


def test_a_link_that_is_asked_for_wins_but_keeps_the_bytes(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce())
    assert load_source([step]).link is None  # ranks without accelerators have no link that is published
    asked = load_source([step, exchange], gbit_s=25.0).link
    assert (asked.gbit_s, asked.exchange_bytes) == (25.0, 100_000_000)
    assumed = load_source([step], gbit_s=25.0).link
    assert (assumed.exchange_bytes, assumed.source) == (
        102_228_128, '--link-gbit-s, float32 gradients of resnet50 are supposed')
    small = dump('c.json', bench_train({'precision': 'float16', 'num_parameters': 1000}))
    assert load_source([small], gbit_s=25.0).link.exchange_bytes == 2000
    assert load_source(['dgxa100_ngc20.06_mxnet'], gbit_s=25.0).link.source == (
        '--link-gbit-s, float16 gradients of ResNet-50 are supposed')


def test_an_exchange_within_one_host_says_nothing_of_the_link(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce(num_hosts=1))
    source = load_source([step, exchange])
    assert source.link is None and 'within one host' in source.notes[-1]
    assert load_source([step, exchange], gbit_s=10.0).link.exchange_bytes == 100_000_000


def test_an_exchange_alone_has_its_step(dump):
    source = load_source([dump('b.json', bench_allreduce())])
    assert (source.base.step_s, source.base.num_nodes, source.base.num_units) == (1.0, 2, 2)
    exchange = bench_allreduce()
    del exchange['tables'][1]['rows'][0]['step_ms']
    with pytest.raises(UserError, match='has no step_ms, expected a bench train beside it'):
        load_source([dump('b.json', exchange)])


def test_other_images_than_imagenets_have_steps_only(dump):
    source = load_source([dump('a.json', bench_train({'image_size': 32}))])
    assert source.base.dataset == 'images of 32 pixels' and source.base.evaluation_s is None
    assert load_source([dump('a.json', bench_train({'model': 'vgg16'}))]).base.evaluation_s is None


def test_of_several_rows_those_of_few_hosts_and_the_asked_for_ranks_count(dump):
    rows = [{'num_ranks': 4, 'step_ms': 400.0}, {'num_ranks': 8, 'num_hosts': 2}, {'num_ranks': 1}]
    path = dump('a.json', bench_train(*rows))
    assert load_source([path], per_node=4).base.num_units == 4
    assert load_source([path], per_node=4).base.exchange_s == pytest.approx(0.005)  # no more than it takes alone
    assert load_source([path], per_node=1).base.num_units == 1
    path = dump('a.json', bench_train({'local_batch_size': 32}, {'local_batch_size': 64}))
    assert load_source([path], local_batch_size=64).base.global_batch_size == 64
    with pytest.raises(ConfigError, match='2 measurements could be started from: resnet50, float32, synthetic'):
        load_source([path])


def test_there_is_one_thing_to_start_from(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce())
    for words in ([step, step], [exchange, exchange], [step, 'dgxa100_ngc20.06_mxnet']):
        with pytest.raises(ConfigError, match='are several things to start from, expected one'):
            load_source(words)
    with pytest.raises(ConfigError, match='--system: got x, expected a SOURCE that is a folder'):
        load_source([step], 'x')
    of_gpus = load_source([dump('c.json', bench_train(gpus=['A100']))])
    assert of_gpus.link == published_link() and of_gpus.notes[-1].startswith('Nobody says what joins the nodes')
    assert load_source(['dgxa100_ngc20.06_mxnet', exchange]).link.exchange_bytes == 100_000_000


def changed(content, path, value):
    """A file with one value replaced; path: keys and places."""
    content = json.loads(json.dumps(content))
    place = content
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


ROW = ('tables', 0, 'rows', 0)


@pytest.mark.parametrize('path, value, said', [
    (('format',), 'mlperf-rn50 bench data 1', 'format: got mlperf-rn50 bench data 1, expected mlperf-rn50 bench train'),
    (('format',), 7, 'format: got 7, expected a text'), (('format',), KeyError, 'format: got null, expected a text'),
    (('machine',), [], 'machine: got [], expected an object'),
    (('machine', 'gpus'), 'A100', 'machine.gpus: got "A100", expected a list'),
    (('tables',), {}, 'tables: got {}, expected a list of 1 to 1000 objects'),
    (('tables',), [], 'tables: got [], expected a list'), (('tables', 0), 3, 'tables[0]: got 3, expected an object'),
    (('tables', 0, 'rows'), [{}] * 1001, 'tables[0].rows: got [{}, {}'),
    (ROW, None, 'tables[0].rows[0]: got null, expected an object'),
    ((*ROW, 'step_ms'), float('nan'), 'tables[0].rows[0].step_ms: got NaN, expected a number from 0.001 to 1e+08'),
    ((*ROW, 'step_ms'), 1e308, 'step_ms: got 1e+308'), ((*ROW, 'step_ms'), float('inf'), 'step_ms: got Infinity'),
    ((*ROW, 'step_ms'), 0, 'step_ms: got 0'), ((*ROW, 'step_ms'), True, 'step_ms: got true'),
    ((*ROW, 'step_ms'), '300', 'step_ms: got "300"'), ((*ROW, 'step_ms'), KeyError, 'step_ms: got null'),
    ((*ROW, 'step_ms'), 10**400, 'step_ms: got 1000'),
    ((*ROW, 'num_ranks'), 1.5, 'num_ranks: got 1.5, expected a whole number from 1 to 1000000'),
    ((*ROW, 'num_ranks'), True, 'num_ranks: got true, expected a whole number'),
    ((*ROW, 'num_hosts'), 2, 'num_hosts: got 2, expected a whole number from 1 to 1'),
    ((*ROW, 'local_batch_size'), -32, 'local_batch_size: got -32'), ((*ROW, 'model'), ['x'], 'model: got ["x"]'),
    ((*ROW, 'num_ranks'), '\x9b2J\u202e', 'num_ranks: got "?2J?"'),
    ((*ROW, 'backward_ms'), -1, 'backward_ms: got -1'), ((*ROW, 'forward_ms'), None, 'forward_ms: got null')])
def test_what_no_bench_writes_is_one_line(dump, path, value, said):
    with pytest.raises(UserError) as e:
        load_source([dump('a.json', changed(bench_train(), path, value))])
    text = str(e.value)
    assert said in text and 'a.json: ' in text and '\n' not in text and len(text) < 400


@pytest.mark.parametrize('path, value, said', [
    (('tables', 0, 'title'), 'All-reduce over 1 ranks', 'no table of an all-reduce over 2 or more ranks'),
    (('tables', 0, 'title'), 'All-reduce over 99999999 ranks', 'no table of an all-reduce over 2 or more ranks'),
    (('tables', 1, 'title'), 'x', 'no table of an all-reduce'), (('tables', 1, 'title'), 5, 'tables[1].title: got 5'),
    (('machine', 'num_hosts'), 3, 'machine.num_hosts: got 3, expected a whole number from 1 to 2'),
    (('tables', 1, 'rows', 0, 'bytes'), 1e300, 'bytes: got 1e+300'),
    (('tables', 1, 'rows', 0, 'time_ms'), 0, 'time_ms: got 0'),
    (('tables', 1, 'rows', 0, 'time_ms'), float('nan'), 'time_ms: got NaN')])
def test_what_no_bench_of_the_exchange_writes_is_one_line(dump, path, value, said):
    with pytest.raises(UserError) as e:
        load_source([dump('b.json', changed(bench_allreduce(), path, value))])
    assert said in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 400


@pytest.mark.parametrize('text, said', [
    ('', 'is no JSON that can be read'), ('{', 'is no JSON that can be read'),
    ('[]', 'the file: got [], expected an object'),
    ('[' * 100_000, 'is nested too deeply'), ('{"format": "\x1b[2J"}', 'is no JSON that can be read'),
    ('{"format": "\\u001b[2J"}', 'format: got ?[2J, expected mlperf-rn50 bench'),
    ('{"a": ' + '1' * 5000 + '}', 'is no JSON that can be read'), (' ' * 5_000_000, 'is larger than 4194304 bytes')])
def test_a_file_that_is_no_bench_is_one_line(dump, text, said):
    with pytest.raises(UserError) as e:
        load_source([dump('a.json', text)])
    assert said in str(e.value) and '\n' not in str(e.value) and '\x1b' not in str(e.value)


def test_a_bench_needs_no_name_of_its_own(dump):
    assert load_source([dump('step.txt', '\n ' + json.dumps(bench_train()))]).base.step_s == 0.3


def test_the_power_of_a_node_is_that_of_the_runs_or_not_known(monkeypatch, tmp_path):
    from mlperf_rn50.study.convergence import System
    write_set(tmp_path / '2x4', 2, nodes=2, ranks=8)
    assert load_source([str(tmp_path)]).power is None
    monkeypatch.setattr(System, 'energy', Energy(10.0, cpu_joules=1000.0, gpu_joules=5000.0))
    assert load_source([str(tmp_path)]).power == Power(300.0, ('cpu', 'gpu'))
    monkeypatch.setattr(System, 'energy', Energy(10.0))  # telemetry without counters
    assert load_source([str(tmp_path)]).power is None
