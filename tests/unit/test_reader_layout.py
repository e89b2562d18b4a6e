"""Nodes, ranks, accelerators and batch are weighed: lost and doubled lines are no other layout."""
import json

import pytest
from lines import mllog, run_lines, v05, v06, write_lines

from mlperf_rn50.mlperf.arguments import batch_sizes
from mlperf_rn50.mlperf.evidence import lost_lines
from mlperf_rn50.mlperf.reader import read_run


def texts(run):
    return [w.text for w in run.warnings]


def v05_lines(*, nodes=1, ranks=1, batch=256, clears=None):
    """A v0.5 run whose every rank writes its seed, and every node that it cleared its cache."""
    return [*(v05('run_clear_caches', -9 + n / 1e6) for n in range(nodes if clears is None else clears)),
            v05('run_start', 0), *(v05('run_set_random_seed', n / 1e6, n) for n in range(ranks)),
            v05('input_batch_size', 1, batch), v05('train_epoch', 2, 0), v05('eval_start', 12),
            v05('eval_accuracy', 13, {'epoch': 0, 'value': 0.75}), v05('eval_stop', 13), v05('run_stop', 13),
            v05('run_final', 14)]


@pytest.fixture
def read(tmp_path):
    """Reads some lines, with an entry.json of so many nodes and accelerators of each beside them."""
    def read(lines, *entry, **system):
        home = tmp_path / 'us/results/box'
        log = write_lines(home / 'resnet/result_0.txt', lines)
        if entry:
            (home / 'entry.json').write_text(json.dumps({'nodes': [dict(zip(('num_nodes', 'num_accelerators',
                                                                             'accelerator'), entry))]}))
        if system:
            (tmp_path / 'us/systems').mkdir()
            (tmp_path / 'us/systems/box.json').write_text(json.dumps(system))
        return read_run(log)
    return read


def without(lines, key, *numbers):
    """Lines without some of a key."""
    found = [line for line in lines if f' {key}' in line or f'"{key}"' in line]
    lost = [found[n] for n in numbers]
    return [line for line in lines if line not in lost]


@pytest.mark.parametrize('entry', [(40, 16), ()], ids=['entry.json', 'caches alone'])
def test_lost_lines_of_seeds_are_no_other_batch(read, entry):
    run = read(without(v05_lines(nodes=40, ranks=640, batch=26), 'run_set_random_seed', 5, 300), *entry)
    assert (run.num_nodes, run.num_ranks, run.num_accelerators, run.global_batch_size) == (40, 640, 640, 16640)
    assert len(texts(run)) == 1 and texts(run)[0].startswith('2 of 640 lines of seeds are missing, 638 are there, by ')


def test_what_was_counted_alone_is_implied(read):
    run = read(v05_lines(clears=1, ranks=638, batch=26))
    assert (run.num_accelerators, run.sources['num_accelerators'].basis) == (638, 'implied')
    assert run.warnings == ()


def test_a_lost_line_of_a_cache_is_no_node_less(read):
    run = read(v05_lines(clears=39, ranks=640, batch=26), 40, 16)
    assert (run.num_nodes, run.num_accelerators, run.global_batch_size) == (40, 640, 16640)
    assert texts(run) == ['the 39 lines that clear a cache says 39 nodes, entry.json 40; 40 counts']


@pytest.mark.parametrize('extra', [
    [v06('submission_entry', -9, "{'nodes': \"{'num_nodes': '3', 'num_accelerators': '8'}\"}")],
    [v06('submission_platform', -9, '3xbox')]])
def test_lost_lines_of_a_later_round(read, extra):
    lines = [*extra, *[v06('init_start', -8)] * 23, v06('run_start', 0), v06('global_batch_size', 0, 4992)]
    run = read(lines)
    assert (run.num_nodes, run.num_ranks, run.num_accelerators, run.global_batch_size) == (3, 24, 24, 4992)
    assert any(t.startswith('1 of 24 lines of init_start are missing, 23 are there') for t in texts(run))


@pytest.mark.parametrize('system, inits', [(('1', '8'), 7), (('2', '4'), 7), (('2', '4'), 5)])
def test_lost_lines_by_a_system_description(read, system, inits):
    lines = [line for line in run_lines(ranks=inits) if '"submission_platform"' not in line]
    run = read(lines, submitter='us', number_of_nodes=system[0], accelerators_per_node=system[1])
    assert (run.num_nodes, run.num_ranks, run.num_accelerators) == (int(system[0]), 8, 8)
    assert len(texts(run)) == 1 and f'{8 - inits} of 8 lines of init_start are missing' in texts(run)[0]


def test_ranks_may_drive_several_accelerators(read):
    lines = [line for line in run_lines(ranks=4) if '"submission_platform"' not in line]
    run = read(lines, number_of_nodes='4', accelerators_per_node='8')
    assert (run.num_nodes, run.num_ranks, run.num_accelerators) == (4, 4, 32)
    assert texts(run) == ['4 lines of init_start for the 32 accelerators of box.json: each rank drives several, or '
                          'lines are missing; 32 counts']


def test_a_description_of_more_nodes_than_ran_does_not_count(read):
    """As in a published set: entry.json has 36 nodes, the lines of ranks fill 32."""
    for clears in (32, 1):
        run = read(v05_lines(clears=clears, ranks=512, batch=32), 36, 16)
        assert (run.num_nodes, run.num_accelerators, run.global_batch_size) == (32, 512, 16384)
        assert texts(run)[0].startswith('entry.json says 36 nodes, the ')


@pytest.mark.parametrize('count, nodes, missing', [
    (638, 40, 2), (640, 40, 0), (640, 39, 0), (63, 8, 1), (64, 9, 0), (16, 3, 0), (3, 2, 0), (15, 2, 1), (7, 1, 0)])
def test_how_many_lines_are_lost(count, nodes, missing):
    assert lost_lines(count, nodes) == missing


WRITTEN_TWICE = 'the whole log was written 2 times: the lines of ranks and nodes are counted once in 2'


def doubled(lines):
    return [twice for line in lines for twice in (line, f'DEBUG:mlperf_compliance:{line}')]


ARGUMENTS = "INFO:root:start with arguments Namespace(batch_size=4096, gpus='0,1', eval_batch_size=50)"


@pytest.mark.parametrize('entry', [(1, 16), ()])
@pytest.mark.parametrize('order', [doubled, lambda lines: [*lines, *(f'DEBUG:mlperf_compliance:{x}' for x in lines)]],
                         ids=['line by line', 'one stream after another'])
def test_doubled_lines_are_one(read, entry, order):
    run = read([ARGUMENTS, *order(v05_lines())], *entry)
    assert (run.status, run.num_nodes) == ('converged', 1 if entry else None)
    assert (run.num_accelerators, run.global_batch_size, run.num_ranks) == (16, 4096, None)
    assert WRITTEN_TWICE in texts(run)
    assert texts(run)[:1] == ['8 lines: equal to an earlier line in time, key and value; it counts once; first line '
                          + texts(run)[0].split()[-1]]


def test_doubled_lines_by_the_description_alone(read):
    run = read(doubled(v05_lines()), 1, 16)
    assert (run.num_accelerators, run.global_batch_size, len(texts(run))) == (16, 4096, 2)


def test_doubled_lines_of_ranks(read):
    assert read(doubled(v05_lines(nodes=2, ranks=16))).num_accelerators == 16
    twice = [line for line in run_lines(ranks=8) for _ in (1, 2)]
    assert read(twice).num_accelerators == 8 and len(texts(read(twice))) == 2


def test_ranks_may_share_a_time_stamp(read):
    assert read(run_lines(ranks=8)).num_accelerators == 8
    lines = [v05('run_set_random_seed', 0, 1)] * 8
    assert read([*v05_lines(ranks=0), *lines]).num_accelerators == 8


def test_arguments_that_contradict_are_said_first(read):
    torn = v05_lines()[-1][:30]
    run = read([torn, ARGUMENTS.replace('4096', '2048'), *v05_lines()], 1, 16)
    assert (run.num_accelerators, run.global_batch_size) == (16, 4096)
    assert 'says 2048 images a step' in texts(run)[1] and 'torn line' in texts(run)[-1]


@pytest.mark.parametrize('told, logged, batch', [
    (256, 4096, 4096), (32, 512, 512), (4096, 256, 4096), (256, 256, 4096), (32768, 2048, 32768), (2048, 2048, 2048)])
def test_the_arguments_tell_a_local_batch_from_a_global_one(read, told, logged, batch):
    """16 accelerators, of which each has the batch that is logged, or all together."""
    run = read([f'python train.py --batch-size {told}', *v05_lines(batch=logged)], 1, 16)
    assert (run.num_accelerators, run.global_batch_size) == (16, batch) and texts(run) == []


@pytest.mark.parametrize('text, found', [
    ('--batch_size=4096', [4096]), ('--train-batch-size 64 --eval-batch-size 50', [64]), ("{'batch_size': 32}", [32]),
    ('batch_size=1.5', []), ('batch_size_per_gpu=3', []), ('input_batch_size: 26', []), ('batch_size=0', []),
    ('batch_size=3 batch_size=3 global_batch_size=6', [3, 6])])
def test_batch_sizes_among_the_arguments(tmp_path, text, found):
    path = write_lines(tmp_path / 'log', ['first', text, 'last'])
    assert batch_sizes(path) == [(value, 2) for value in found]


def test_batch_sizes_at_the_border_of_a_block(tmp_path):
    path = tmp_path / 'log'
    for shift in range(30):
        path.write_text('x\n' * (2**19 - 15) + ' ' * shift + 'batch_size=4096 \n eval_batch_size=77')
        assert batch_sizes(path) == [(4096, 2**19 - 14)]
        path.write_text('x' * (2**20 - 215 + shift) + ' eval_batch_size=77 ' + 'x' * 300)
        assert batch_sizes(path) == []


def test_agreement_of_two_beats_one(read):
    """A third of the seeds is there twice, the time stamps differ: arguments and description count."""
    lines = [*v05_lines(ranks=16), *(v05('run_set_random_seed', 2 + n, n) for n in range(5))]
    run = read([ARGUMENTS, *lines], 1, 16)
    assert (run.num_accelerators, run.global_batch_size) == (16, 4096)
    assert any('the 21 lines of seeds says 21 accelerators' in t for t in texts(run))


@pytest.mark.parametrize('nodes, each, expected', [
    ('2.0', '4', (2, 8)), (2.0, 4.0, (2, 8)), (' 2 ', '4 ', (2, 8)), ('2', '4x8', (2, 4)), ('2', 'N/A', (2, 4))])
def test_numbers_of_a_description(read, nodes, each, expected):
    lines = [line for line in run_lines(ranks=4) if '"submission_platform"' not in line]
    run = read(lines, number_of_nodes=nodes, accelerators_per_node=each)
    assert (run.num_nodes, run.num_accelerators) == expected
    assert any("accelerators_per_node is '4x8', which is no number" in t for t in texts(run)) == (each == '4x8')


def test_a_description_is_known_by_its_keys(read):
    run = read(run_lines(ranks=1), submitter='us', nodes=[{'num_nodes': 512, 'num_accelerators': 4}])
    assert (run.num_nodes, run.num_accelerators) == (512, 2048)


def test_accelerators_of_the_whole(read):
    run = read(v05_lines(batch=32768), 64, 512, 'chip-512')
    assert (run.num_nodes, run.num_accelerators, run.global_batch_size) == (64, 512, 32768)


def test_a_batch_as_text(read):
    assert read([*run_lines()[:-1], mllog('run_stop', 22, status='success')]).global_batch_size == 64
    assert read([line.replace('"value": 64', '"value": "64"') for line in run_lines()]).global_batch_size == 64
