"""Sources of a prediction: runs, studies, published systems, and files of benches that are not trusted."""
import json

import pytest
from benches import bench_allreduce, bench_train
from lines import run_lines, write_lines, write_set

from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mlperf.energy import Energy
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.known import load_published
from mlperf_rn50.study.predict import PUBLISHED_LINK, ring_s
from mlperf_rn50.study.predict_sources import Power, find_published, full_name, load_source

A100 = 'dgxa100_ngc20.06_mxnet'


@pytest.fixture
def dump(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)
    return write


def test_a_published_system_by_its_name_or_the_last_part_of_it():
    source = load_source([f'V0.7/nvidia/{A100}'])
    assert source.base == load_source([A100]).base and source.link == PUBLISHED_LINK
    assert (source.base.num_nodes, source.base.num_units, source.base.global_batch_size) == (1, 8, 3264)
    assert [k.num_nodes for k in source.sets] == [1, 2, 96]  # what the validation pairs with it
    assert all(find_published(full_name(s)) is s for s in load_published())


@pytest.mark.parametrize('name, said', [
    ('dgxa100_ngc20.06_mxnte', 'did you mean v0.7/NVIDIA/dgxa100_ngc20.06_mxnet?'),
    ('logs/none', 'logs/none: neither a file or folder nor a published system; expected a run'),
    ('a\x1b[31mb', 'a?[31mb: neither')])
def test_an_unknown_name_is_one_line_with_the_nearest(name, said):
    with pytest.raises(ConfigError) as e:
        load_source([name])
    assert said in str(e.value) and '\n' not in str(e.value)


def test_the_fewest_nodes_of_a_study_are_the_base_and_of_several_the_layout_decides(tmp_path):
    for nodes in (4, 1, 2):
        write_set(tmp_path / f'{nodes}x4', 2, nodes=nodes, ranks=4 * nodes, batch=64 * nodes)
    source = load_source([str(tmp_path)])
    assert source.base.name == '1x4' and [k.name for k in source.sets] == ['1x4', '2x4', '4x4']
    assert source.notes[0] == '1x4 of 3 systems is started from: it has the fewest nodes'
    assert load_source([str(tmp_path)], '2x4').base.num_nodes == 2
    with pytest.raises(ConfigError, match='--system: got 2x3, expected one of 1x4, 2x4, 4x4; did you mean 2x4?'):
        load_source([str(tmp_path)], '2x3')
    write_set(tmp_path / '1x2', 2, ranks=2)
    assert load_source([str(tmp_path)], per_node=2).base.name == '1x2'
    with pytest.raises(ConfigError, match='--system: 2 systems could be started from, expected one: 1x2, 1x4'):
        load_source([str(tmp_path)], per_node=8)


def test_a_set_without_times_or_that_is_refused_has_its_reason(tmp_path):
    write_set(tmp_path / 'short', 2, status='aborted', accuracies=(0.1,))
    with pytest.raises(UserError, match='nothing to start from: short: its logs do not tell'):
        load_source([str(tmp_path / 'short')])
    for k, batch in enumerate((64, 128)):
        write_lines(tmp_path / f'mixed/result_{k}.txt', run_lines(batch=batch))
    with pytest.raises(UserError, match='nothing to start from: mixed: global_batch_size is 64'):
        load_source([str(tmp_path / 'mixed')])


def test_the_power_of_a_node_is_that_of_the_runs_or_not_known(monkeypatch, tmp_path):
    write_set(tmp_path / '2x4', 2, nodes=2, ranks=8)
    for energy, power in ((None, None), (Energy(10.0), None),  # no telemetry, telemetry without counters
                          (Energy(10.0, cpu_joules=1000.0, gpu_joules=5000.0), Power(300.0, ('cpu', 'gpu')))):
        monkeypatch.setattr(System, 'energy', energy)
        assert load_source([str(tmp_path)]).power == power


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
    source = load_source([dump('a.json', bench_train()), dump('b.json', bench_allreduce(step_ms=step_ms))])
    assert source.link.is_hidden == is_hidden


def test_a_link_that_is_asked_for_wins_but_keeps_the_bytes(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce())
    small = dump('c.json', bench_train({'precision': 'float16', 'num_parameters': 1000}))
    assert load_source([step]).link is None  # ranks without accelerators have no link that is published
    for words, num_bytes, source in (([step, exchange], 100_000_000, 'gradients as bench allreduce has them'),
                                     ([step], 102_228_128, 'float32 gradients of resnet50 are supposed'),
                                     ([small], 2000, 'float16 gradients of resnet50 are supposed'),
                                     ([A100], 51_000_000, 'float16 gradients of ResNet-50 are supposed')):
        link = load_source(words, gbit_s=25.0).link
        assert (link.gbit_s, link.exchange_bytes, link.source) == (25.0, num_bytes, f'--link-gbit-s, {source}')
    assert load_source([A100, exchange]).link.exchange_bytes == 100_000_000
    of_gpus = load_source([dump('d.json', bench_train(gpus=['A100']))])
    assert of_gpus.link == PUBLISHED_LINK and of_gpus.notes[-1].startswith('Nobody says what joins the nodes')


def test_an_exchange_within_one_host_says_nothing_of_the_link(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce(num_hosts=1))
    source = load_source([step, exchange])
    assert source.link is None and 'within one host' in source.notes[-1]
    assert load_source([step, exchange], gbit_s=10.0).link.exchange_bytes == 100_000_000


def test_an_exchange_alone_has_its_step(dump):
    source = load_source([dump('b.json', bench_allreduce())])
    assert (source.base.step_s, source.base.num_nodes, source.base.num_units) == (1.0, 2, 2)
    with pytest.raises(UserError, match='has no step_ms, expected a bench train beside it'):
        load_source([dump('b.json', bench_allreduce(step_ms=None))])


def test_other_images_than_imagenets_have_steps_only(dump):
    source = load_source([dump('a.json', bench_train({'image_size': 32}))])
    assert source.base.dataset == 'images of 32 pixels' and source.base.evaluation_s is None
    assert load_source([dump('a.json', bench_train({'model': 'vgg16'}))]).base.evaluation_s is None


def test_of_several_rows_those_of_few_hosts_and_the_asked_for_ranks_count(dump):
    rows = [{'num_ranks': 4, 'step_ms': 400.0}, {'num_ranks': 8, 'num_hosts': 2}, {'num_ranks': 1}]
    path = dump('a.json', bench_train(*rows))
    four = load_source([path], per_node=4).base
    assert (four.num_units, four.exchange_s) == (4, pytest.approx(0.005))  # no more than it takes alone
    assert load_source([path], per_node=1).base.num_units == 1
    path = dump('a.json', bench_train({'local_batch_size': 32}, {'local_batch_size': 64}))
    assert load_source([path], local_batch_size=64).base.global_batch_size == 64
    with pytest.raises(ConfigError, match='2 measurements could be started from: resnet50, float32, synthetic'):
        load_source([path])


def test_there_is_one_thing_to_start_from(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce())
    for words in ([step, step], [exchange, exchange], [step, A100]):
        with pytest.raises(ConfigError, match='are several things to start from, expected one'):
            load_source(words)
    with pytest.raises(ConfigError, match='--system: got x, expected a SOURCE that is a folder'):
        load_source([step], 'x')


def refusal_of(file):
    with pytest.raises(UserError) as e:
        load_source([file])
    text = str(e.value)
    assert '.json: ' in text and '\n' not in text and '\x1b' not in text and '\x9b' not in text and len(text) < 400
    return text


@pytest.mark.parametrize('text, said', [
    ('', 'Input data was truncated'), ('[]', 'Expected `object`, got `array`'), ('{"a": ' * 100_000, 'recursion'),
    ('{"format": "\x1b[2J"}', 'JSON is malformed'), ('{"format": "\\u001b[2J"}', 'at `$.format`'),
    (' ' * 5_000_000, 'is larger than 4194304 bytes')])
def test_a_file_that_is_no_bench_is_one_line(dump, text, said):
    assert said in refusal_of(dump('a.json', text))


ROW, GRADIENTS = ('tables', 0, 'rows', 0), ('tables', 1, 'rows', 0)


@pytest.mark.parametrize('path, value', [
    (('format',), 'mlperf-rn50 bench data 1'), (('machine', 'gpus'), 'A100'), (('tables',), []),
    (('tables', 0, 'rows'), [{}] * 1001), *(((*ROW, 'step_ms'), v) for v in (1e308, 0, True, '300', None)),
    ((*ROW, 'num_ranks'), 1.5), ((*ROW, 'num_hosts'), 2), ((*ROW, 'local_batch_size'), -32),
    ((*ROW, 'model'), '\x9b2J\u202e'), ((*ROW, 'forward_ms'), None),
    (('tables', 1, 'title'), 5), (('machine', 'num_hosts'), 3), ((*GRADIENTS, 'bytes'), 1e300),
    ((*GRADIENTS, 'time_ms'), 0)])
def test_a_value_that_no_bench_writes_is_one_line_that_names_the_place(dump, path, value):
    content = bench_train() if path[:2] == ROW[:2] or path == ('format',) else bench_allreduce()
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert path[-1] in refusal_of(dump('a.json', content))


def test_an_exchange_is_one_of_two_ranks_or_more(dump):
    assert 'no table of an all-reduce over 2 or more ranks' in refusal_of(dump('a.json', bench_allreduce(1, 1)))
