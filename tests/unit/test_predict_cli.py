"""predict from sources to output: runs, published systems, and untrusted bench files."""

import json
import re
import shlex

import pytest
from benches import bench_allreduce, bench_train
from helpers import ROOT, call
from lines import write_set

from mlperf_rn50.analysis.predict.model import ring_s
from mlperf_rn50.analysis.predict.source import load_source
from mlperf_rn50.errors import ConfigError, UserError

A100 = 'dgxa100_ngc20.06_mxnet'
PAGE = (ROOT / 'docs/predict.md').read_text()
SHOWN = re.findall(
    r'```bash\nmlperf-rn50 (predict [^\n]*?)(?: +#[^\n]*)?\n```\n\n```text\n(.*?)\n```',
    PAGE,
    re.DOTALL,
)
assert len(SHOWN) == 2, 'the page shows a prediction and the errors'


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


@pytest.mark.parametrize(
    'name, message',
    [
        ('dgxa100_ngc20.06_mxnte', 'did you mean v0.7/NVIDIA/dgxa100_ngc20.06_mxnet?'),
        # v1.1 has it, too
        ('v2.0/Dell/XE8545x4A100-SXM-80G', 'did you mean v2.0/Dell/XE8545x4A100-SXM-80GB?'),
        ('v3.0/NVIDIA/dgxa100_ngc20.06_mxnet', 'did you mean v0.7/NVIDIA/dgxa100_ngc20.06_mxnet?'),
        ('nvidia', 'or a system such as v4.0/NVIDIA/'),
        ('nvidia', ' more; list them all: mlperf-rn50 report published'),
        ('v2.0/NVIDIA', 'v2.0/NVIDIA/dgxa100_ngc22.04_mxnet, '),
        ('dgxa100_ngc20.06_mxnet/x', 'did you mean v0.7/NVIDIA/dgxa100_ngc20.06_mxnet?'),
        # the newest first
        (
            'DGX-A100',
            'such as v2.0/NVIDIA/dgxa100_ngc22.04_mxnet, v1.1/NVIDIA/dgxa100_ngc21.09_mxnet',
        ),
        ('dell xe8545 x4', 'such as v2.0/Dell/XE8545x4A100-SXM-80GB, '),
        (
            'xe8545x4A100-SXM-80GB',
            'which names 3 published systems, expected one of v1.0/Dell/XE8545x4A100-SXM-80GB, '
            'v1.1',
        ),
        ('a\x1b[31mb', 'a?[31mb: not a file, folder or published system; expected a run'),
    ],
)
def test_unknown_name_is_a_one_line_error_with_the_nearest_name(name, message):
    with pytest.raises(ConfigError) as e:
        load_source([name])
    assert message in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 450


def test_base_has_the_fewest_nodes_and_a_matching_layout(tmp_path):
    for nodes in (4, 1, 2):
        write_set(tmp_path / f'{nodes}x4', 2, True, nodes=nodes, ranks=4 * nodes, batch=64 * nodes)
    source = load_source([str(tmp_path)])
    assert source.base.name == '1x4' and [k.name for k in source.sets] == ['1x4', '2x4', '4x4']
    assert (
        source.notes[0]
        == 'Predicted from 1x4, the smallest of 3 systems; --system NAME selects another'
    )
    assert load_source([str(tmp_path)], '2x4').base.num_nodes == 2
    with pytest.raises(
        ConfigError,
        match='--system: got 2x3, which matches 0 systems, expected one of 1x4, 2x4, 4x4; did you mean '
        '2x4?',
    ):
        load_source([str(tmp_path)], '2x3')
    write_set(tmp_path / '1x2', 2, True, ranks=2)
    assert load_source([str(tmp_path)], per_node=2).base.name == '1x2'
    with pytest.raises(
        ConfigError, match=r'got no name, which matches 2 systems, expected one of 1x2, 1x4$'
    ):
        load_source([str(tmp_path)], per_node=8)


def test_unusable_set_is_refused_with_its_reason(tmp_path):
    write_set(tmp_path / 'short', 2, True, division='open', status='aborted', accuracies=(0.1,))
    write_set(tmp_path / 'mixed', 2, True, batch=lambda k: 64 << k)
    for name, reason in (('short', 'no run has finished'), ('mixed', 'global_batch_size is 64')):
        with pytest.raises(UserError, match=f'no set to predict from: {name}: {reason}'):
            load_source([str(tmp_path / name)])


# the step alone takes 300 ms, the exchange 800 ms
@pytest.mark.parametrize(
    'step_ms, overlap, extra_s',
    [(1000.0, 0.125, 0.0), (700.0, 0.5, 0.0), (1200.0, 0.0, 0.1), (200.0, 1.0, 0.0)],
)
def test_step_and_exchange_come_from_bench_files(dump, step_ms, overlap, extra_s):
    source = load_source(
        [dump('a.json', bench_train()), dump('b.json', bench_allreduce(step_ms=step_ms))]
    )
    base, link = source.base, source.link
    assert (base.step_s, base.global_batch_size, base.dataset) == (0.3, 32, None)
    assert (base.num_nodes, base.num_units, base.has_accelerators) == (1, 1, False)
    assert base.evaluation_s == pytest.approx(0.1 * 50_000 / 32)
    assert link.gbit_s == pytest.approx(1.0)  # 100 MB in 800 ms over 2 ranks
    assert link.overlap == pytest.approx(overlap) and 'over 2 ranks on 2 nodes' in link.source
    assert link.extra_s == pytest.approx(extra_s)


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
    link = load_source([A100, exchange]).link
    # 100 MB in 800 ms over 2 ranks
    assert (link.gbit_s, link.exchange_bytes, link.extra_s) == (1.0, 51_000_000, None)
    gpu = dump('d.json', bench_train(gpus=['A100']))
    assert load_source([gpu]).link.gbit_s is None and load_source([gpu]).base.generation == 'A100'
    assert (
        'Ports between nodes unknown: 400 Gbit/s per node assumed'
        in call('predict', gpu, '--layouts', '2x1').stdout
    )


def test_measured_step_on_several_nodes_is_predicted_as_measured(dump):
    # hidden partly, almost wholly, not
    for step_ms, time_ms in ((900.0, 800.0), (310.0, 300.0), (1200.0, 800.0)):
        step = dump('a.json', bench_train({'image_size': 32}))
        exchange = dump('b.json', bench_allreduce(step_ms=step_ms, time_ms=time_ms))
        found = rows(step, exchange, '--layouts', '1x1 2x1')
        assert [1e3 * r['step_s'] for r in found] == pytest.approx([300.0, step_ms])
        assert found[1]['measured_share'] == 1
        [changed] = rows(step, exchange, '--layouts', '2x1', '--what-if', 'tcp')
        assert changed['measured_share'] < 1  # neither overlap nor latency were measured over TCP
    several = bench_train({'num_ranks': 8, 'num_hosts': 2, 'image_size': 32}, gpus=['A100'])
    found = rows(dump('a.json', several), '--layouts', '2x4 4x4')
    assert found[0]['step_s'] == pytest.approx(0.3) and found[1]['step_s'] > 0.3


def test_bench_rows_may_differ_only_in_the_batch(dump):
    # For other image sizes and networks, only the step time is known.
    base = load_source([dump('a.json', bench_train({'num_ranks': 4, 'image_size': 32}))]).base
    assert (base.num_units, base.dataset, base.evaluation_s) == (4, 'images of 32 pixels', None)
    for row in (
        {'num_ranks': 4},
        {'num_ranks': 2, 'num_hosts': 2},
        {'model': 'vgg16'},
        {'precision': 'float16'},
        {'input': 'real'},
        {'num_parameters': 5},
        {'local_batch_size': 32},
    ):
        content = bench_train({}, {'local_batch_size': 64, **row})
        content['tables'].append(
            {'title': 'Scaling efficiency', 'rows': [{'num_ranks': 1, 'efficiency': 1.0}]}
        )
        with pytest.raises(
            ConfigError, match='got resnet50, .*, 32 per rank, .* expected rows that differ'
        ):
            load_source([dump('a.json', content)])


def test_several_batches_of_a_bench_give_the_line_of_the_step(dump):
    path = dump(
        'a.json',
        bench_train(
            {'image_size': 32}, {'image_size': 32, 'local_batch_size': 64, 'step_ms': 500.0}
        ),
    )
    base = load_source([path]).base
    assert (base.local_batch_size, base.step_s, base.steps) == (64, 0.5, ((32, 0.3),))
    assert load_source([path], local_batch_size=32).base.steps == ((64, 0.5),)
    [row] = rows(path, '--layouts', '1x1', '--local-batch-size', 16)
    assert row['compute_s'] == pytest.approx(0.2)
    both = [
        {'image_size': 32, 'local_batch_size': b, 'step_ms': ms, 'num_ranks': 2, 'num_hosts': 2}
        for b, ms in ((64, 500.0), (32, 300.0))
    ]
    [row] = rows(
        dump('b.json', bench_train(*both)),
        '--layouts',
        '2x1',
        '--local-batch-size',
        48,
        '--link-gbit-s',
        10,
    )
    assert row['step_s'] == pytest.approx(0.4)  # both steps include the same exchange


def test_only_one_source_of_each_kind_is_accepted(dump):
    step, exchange = dump('a.json', bench_train()), dump('b.json', bench_allreduce())
    for words in ([step, step], [exchange], [step, exchange, exchange], [step, A100]):
        with pytest.raises(
            ConfigError, match='SOURCE: got .*, expected one run, study, published system or'
        ):
            load_source(words)
    with pytest.raises(ConfigError, match='--system: got x, expected a SOURCE that is a folder'):
        load_source([step], 'x')


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
        (altered('format', value='mlperf-rn50 bench data 1'), 'format'),
        (altered('tables', value=[]), 'tables'),
        (altered('machine', 'gpus', value='A100'), 'gpus'),
        (altered(*GRADIENTS, 'num_hosts', value=3), 'num_hosts'),
        (altered(*ROW[:3], value=[{}] * 1001), 'rows'),
        (altered(*ROW, 'model', value='\x9b2J\u202e'), 'model'),
        *((altered(*ROW, 'step_ms', value=v), 'step_ms') for v in (1e308, 0, '300')),
        (altered(*ROW, 'num_hosts', value=2), 'num_hosts'),
        (altered(*ROW, 'local_batch_size', value=-32), 'local_batch'),
        (altered(*GRADIENTS, 'bytes', value=1e300), 'bytes'),
        (altered(*GRADIENTS, 'time_ms', value=0), 'time_ms'),
    ],
)
def test_invalid_bench_file_is_a_one_line_error_with_the_location(dump, content, message):
    with pytest.raises(UserError) as e:
        load_source([dump('a.json', content)])
    text = str(e.value)
    assert message in text and '.json: ' in text and text.isprintable() and len(text) < 400


def test_layouts_are_nodes_like_those_of_the_source():
    def names(*words):
        return [r['name'] for r in rows('dgx1_ngc19.05_mxnet', *words)]

    assert names() == ['1x8', '2x8', '4x8', '8x8', '16x8']
    assert names('--layouts', '16,2x4', '16x8') == ['16x8', '2x4']
    assert call('predict', 'dgx1_ngc19.05_mxnet', '--layouts', '3').stdout.startswith('3x8, ')


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """Sets of 1 and 2 nodes of two ranks, with 64 images per rank and step."""
    folder = tmp_path_factory.mktemp('study')
    for nodes in (1, 2):
        write_set(
            folder / f'{nodes}x2',
            2,
            True,
            nodes=nodes,
            ranks=2 * nodes,
            batch=128 * nodes,
            accelerators=False,
            train_samples=6400,
            dataset='digits',
            target=0.75,
        )
    return folder


def rows(*words):
    done = call('predict', *words, '--format', 'json')
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)['predictions']


def test_options_change_the_prediction(study):
    def layouts(*words):
        return [r['layout'] for r in rows(study, '--layouts', *words)]

    assert [k['recipe']['global_batch_size'] for k in layouts('1x2 1x4')] == [128, 256]
    assert [k['recipe']['global_batch_size'] for k in layouts('1x2 1x4', '--strong')] == [128, 128]
    assert layouts('1x2', '--local-batch-size', 8)[0]['recipe']['global_batch_size'] == 16
    assert (
        layouts('1x2')[0]['epochs'] and not layouts('1x2', '--global-batch-size', 64)[0]['epochs']
    )
    assert layouts('1x2', '--target', 0.9)[0]['epochs'] is None  # no run reached this accuracy
    assert layouts('1x2', '--optimizer', 'lars')[0]['epochs'] is None
    slow, fast = (
        rows(study, '--layouts', '2x2', '--link-gbit-s', x)[0]['exchange_s'] for x in (1, 10)
    )
    # float32 gradients of ResNet-50
    assert (slow, 10 * fast) == pytest.approx([ring_s(102_228_128, 4, 1.0)] * 2)
    assert (
        rows(study, '--layouts', '1x2', '--system', '2x2', '--link-gbit-s', 10)[0][
            'measured_minutes'
        ]
        is not None
    )


def test_prediction_from_bench_files(dump):
    [row] = rows(dump('small.json', bench_train({'image_size': 32})), '--layouts', '1x1')
    assert row['minutes'] is None and row['step_s'] == pytest.approx(0.3)
    step = dump('step.json', bench_train({'local_batch_size': 26}, gpus=['A100']))
    [row] = rows(step, '--layouts', '8x8', '--optimizer', 'lars')  # 1,664 images of ImageNet
    assert (
        row['layout']['recipe']['opt_name'] == 'lars'
        and row['minutes'] > 0
        and row['layout']['epochs']['source']
    )


def test_exit_code_depends_on_predicted_minutes_and_files_are_complete(study, tmp_path):
    done = call('predict', study, '--layouts', '2x2', '--out', tmp_path, '--format', 'markdown')
    assert done.returncode == 1 and done.stderr == f'mlperf-rn50: wrote {tmp_path}\n'
    assert (tmp_path / 'prediction.md').read_text() == done.stdout
    assert (
        json.loads((tmp_path / 'prediction.json').read_text())['format'] == 'mlperf-rn50 predict 3'
    )
    assert call('predict', study, '--layouts', '1x2 2x2').returncode == 0
    assert call('predict', '--validate', study).returncode == 1


@pytest.mark.parametrize('command, text', SHOWN, ids=[c[:40] for c, _ in SHOWN])
def test_page_shows_the_output_of_the_command(command, text):
    shown, lines = text.splitlines(), call(*shlex.split(command)).stdout.rstrip().splitlines()
    is_excerpt = '--validate' in command
    assert set(shown) <= set(lines) and (is_excerpt or shown == lines), (
        f'copy the output of mlperf-rn50 {command}'
    )
