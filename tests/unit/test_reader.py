"""Logs of other people: lines shared with other output, lost lines, descriptions, linked folders,
other file names."""

import bz2
import gzip
import json
import lzma
import tarfile
import zipfile

import pytest
from helpers import call
from lines import START_S, complete, mllog, run_lines, v05, v06, write_lines, write_set

from mlperf_rn50.analysis.sets.defects import set_findings
from mlperf_rn50.analysis.sets.load import describe_others, load_logs, load_run_sets
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.check.judge import check_log
from mlperf_rn50.mllog.events import decode_events
from mlperf_rn50.mllog.findings import make_finding
from mlperf_rn50.mllog.read.reader import read_run

ENTRY = {
    'framework': 'MXNet 1.4',
    'nodes': [{'num_nodes': 36, 'num_accelerators': 8, 'accelerator': 'Tesla V100'}],
}


def lines_of(line, nodes=1, ranks=8, entry=None, seed=None):
    """Return a log in the format of v0.5 or v0.6, with a line of each node and rank."""
    is_v05 = line is v05
    lines = [line('run_clear_caches' if is_v05 else 'cache_clear', k - 5.0) for k in range(nodes)]
    lines += [line('submission_entry', -4.0, entry)] if entry else []
    lines += [
        line('run_set_random_seed', k / 1e3, k if seed is None else seed)
        if is_v05
        else line('init_start', k / 1e3)
        for k in range(ranks)
    ]
    if is_v05:
        return [
            *lines,
            v05('run_start', 1.0),
            v05('input_batch_size', 1.0, 32),
            v05('train_epoch', 2.0, 0),
            v05('eval_accuracy', 12.0, {'epoch': 0, 'value': 0.76}),
            v05('run_stop', 13.0),
            v05('run_final', 13.0),
        ]
    return [
        *lines,
        v06('run_start', 1.0),
        v06('epoch_start', 2.0, epoch_num=1),
        v06('eval_accuracy', 12.0, 0.76, epoch_num=1),
        v06('run_stop', 13.0, status='success'),
    ]


@pytest.mark.parametrize(
    'line, tail, value',
    [
        (mllog('k', 0, 3), '\x1b[0m', 3),
        (mllog('k', 0, 3), 'rank 7: ready', 3),
        (mllog('k', 0, 'a}'), '"}]', 'a}'),
        (mllog('k', 0, 3).replace(':::MLLOG ', ':::MLLOG'), ' ', 3),
        (v06('k', 0, {'a': [1]}), ' 3/10 [00:01]', {'a': [1]}),
        (v05('k', 0, 3), '\x1b[0m', 3),
        (v05('k', 0, 3), ' | 7 images/s', 3),
        (v05('k', 0, {'a': 0.5}), 'x', {'a': 0.5}),
        (v05('k', 0, 'none'), 'x', 'none'),
        (v05('k', 0), '\x1b[0m', None),
        (v05('k', 0), ' images: 7', None),
    ],
)
def test_event_followed_by_other_output_counts(line, tail, value):
    (event,) = decode_events(f'1%\x1b[32m{line}{tail}')
    assert (event.key, event.value, event.time_s) == ('k', value, START_S)


@pytest.mark.parametrize(
    'line',
    [
        v05('train_epoch', 0, 3) + '4%',
        v05('eval_accuracy', 0, 0.7) + '.1',
        v05('run_st', 0),
        v05('train_epoch', 0) + ':',
        v05('train_epoch', 0) + ' :',
        mllog('run_stop', 0)[:-1],
        v06('run_stop', 0)[:-1] + '\x1b[0m',
        ':::MLPv0.7.0 resnet 1',
    ],
)
def test_cut_or_unknown_event_is_an_error_with_a_reason(line):
    (event,) = decode_events(line)
    assert isinstance(event, ValueError) and event.args[0] and event.args[1] == line.strip()


@pytest.mark.parametrize(
    'changes, target, status',
    [
        ([{}], 0.98, 'failed'),
        ([{'train.target_accuracy': [0.98, 0.7]}], 0.7, 'converged'),
        ([{'train.target_accuracy': [0.98, 0.7]}, {}], 0.7, 'converged'),
        (
            [{'train.target_accuracy': [0.98, 0.7]}, {'train.target_accuracy': [0.7, 0.9]}],
            0.9,
            'failed',
        ),
        ([{'train.target_accuracy': [0.98, 'x']}], 0.98, 'failed'),
        (['train.target_accuracy'], 0.98, 'failed'),
    ],
)
def test_target_of_the_last_resume_that_changed_it_counts(tmp_path, changes, target, status):
    *lines, stop = run_lines((0.75, 0.76), target=0.98)
    lines += [
        mllog('run_resumed', 30, 1, epoch_num=1, clock_s=22.0, changed=changed)
        for changed in changes
    ]
    lines += [
        mllog('eval_accuracy', 40, 0.77, epoch_num=3),
        mllog('run_stop', 41, status='success'),
    ]
    run = read_run(write_lines(tmp_path / 'result_0.txt', lines))
    assert (run.target_accuracy, run.status) == (target, status), stop
    assert not any(f.kind == 'trained_past_target' for f in run.findings)


def test_whole_seconds_are_a_time_of_v05():
    (event,) = decode_events(':::MLPv0.5.0 resnet 1541213547 (caffe.cpp:248) run_start')
    assert (event.key, event.time_s) == ('run_start', 1541213547.0)


@pytest.mark.parametrize(
    'torn',
    [
        mllog('run_stop', 22, status='success')[:-3],
        v05('eval_accuracy', 0, {'epoch': 1, 'value': 0.5})[:-4],
        v06('run_start', 0)[:-3],
        v05('run_sto', 0),
    ],
)
def test_torn_line_of_a_vital_event_is_a_warning(tmp_path, torn):
    run = read_run(
        write_lines(tmp_path / 'result_0.txt', [*run_lines(), torn, mllog('epoch_stop', 0)[:-9]])
    )
    assert [f.kind for f in run.findings if 'torn' in f.kind] == ['event_torn', 'line_torn']


def test_events_that_cannot_be_decoded_are_stated_with_the_reason(tmp_path):
    path = write_lines(
        tmp_path / 'result_0.txt', ['shell', ':::MLLOG {"key": "run_start", "metadata": {}}']
    )
    with pytest.raises(
        UserError, match=r'no MLPerf log line can be decoded \(line 2: no time_ms\); expected lines'
    ):
        read_run(path)
    with pytest.raises(
        UserError, match=r'no MLPerf log line can be decoded \(line 2: no time_ms\); expected'
    ):
        check_log(path)


@pytest.mark.parametrize(
    'lost, settled',
    [
        (1, [('num_ranks', 23, '23 seed lines', 24, 4)]),
        (
            4,
            [
                ('num_nodes', 36, 'entry.json', 3, 4),
                ('num_ranks', 20, '20 seed lines', 24, 4),
                ('num_accelerators', 288, 'entry.json', 24, 4),
            ],
        ),
    ],
)
def test_other_logs_of_a_set_settle_counts_that_a_log_contradicts(tmp_path, lost, settled):
    folder = tmp_path / 'results/box/resnet'
    for k in range(5):
        write_lines(folder / f'result_{k}.txt', lines_of(v05, 3, 24 - lost * (k == 0)))
    (folder.parent / 'entry.json').write_text(json.dumps(ENTRY))
    (system,) = load_run_sets([tmp_path])
    assert system.refusal is None
    assert [
        (r.num_nodes, r.num_ranks, r.num_accelerators, r.global_batch_size) for r in system.runs
    ] == [(3, 24, 24, 24 * 32)] * 5
    found = set_findings(system)
    assert {f.text for f in found if f.kind == 'count_settled'} == {
        make_finding('count_settled', None, *each).text for each in settled
    }
    assert not any('288 is used' in f.text or '36 is used' in f.text for f in found)


@pytest.mark.parametrize(
    'ranks', [lambda k: 4 if k else 2, lambda k: 8 if k > 1 else 7 if k else 4]
)
def test_other_layouts_are_no_lost_lines(tmp_path, ranks):
    write_set(tmp_path, 5, ranks=ranks)
    assert load_run_sets([tmp_path])[0].refusal.startswith('num_accelerators')


def test_batch_that_a_log_states_is_not_settled(tmp_path):
    for k in range(5):
        lines = lines_of(v05, 3, 24)
        write_lines(
            tmp_path / f'results/box/resnet/result_{k}.txt',
            [line.replace('size: 32', 'size: 30') for line in lines] if k == 0 else lines,
        )
    (tmp_path / 'results/box/entry.json').write_text(json.dumps(ENTRY))
    assert load_run_sets([tmp_path])[0].refusal.startswith('global_batch_size is 720')


@pytest.mark.parametrize(
    'lines, accelerators',
    [
        ([v05('run_set_random_seed', 0, 7)] * 2, None),  # by two loggers
        ([v05('run_set_random_seed', t, 7) for t in (0, 60)], None),  # of one process
        (
            [
                v05('run_set_random_seed', 0, 7),
                v05('run_set_random_seed', 0, 9).replace('main.py', 'data.py'),
            ],
            None,
        ),
        ([v05('run_set_random_seed', t, 7) for t in (0, 0.1)], 2),
        ([v05('run_set_random_seed', t, t) for t in (0, 60)], 2),
    ],
)
def test_repeated_seeds_of_v05_are_of_one_rank(tmp_path, lines, accelerators):
    path = write_lines(tmp_path / 'result_0.txt', [*lines, *lines_of(v05, ranks=0)])
    assert read_run(path).num_accelerators == accelerators


@pytest.mark.parametrize(
    'entry',
    [
        ENTRY,
        json.dumps(ENTRY),
        str({**ENTRY, 'nodes': str(ENTRY['nodes'][0])}),
        str({'os': 'x' * 2000, **ENTRY}),
    ],
)
def test_facts_in_a_log_precede_its_description(tmp_path, entry):
    path = write_lines(
        tmp_path / 'us/results/box/resnet/result_0.txt', lines_of(v06, ranks=1, entry=entry)
    )
    (tmp_path / 'us/systems').mkdir()
    (tmp_path / 'us/systems/box.json').write_text(
        json.dumps(
            {
                'number_of_nodes': 1,
                'accelerators_per_node': 1,
                'accelerator_model_name': 'A100',
                'framework': 'TF',
                'submitter': 'us',
            }
        )
    )
    run = read_run(path)
    assert (run.num_nodes, run.num_accelerators, run.accelerator, run.framework, run.org) == (
        36,
        288,
        'Tesla V100',
        'MXNet 1.4',
        'us',
    )


def test_several_kinds_of_nodes_in_a_log_are_added(tmp_path):
    entry = {
        'nodes': [
            {'num_nodes': '2', 'num_accelerators': '8', 'accelerator': 'A'},
            {'num_nodes': 1, 'num_accelerators': 4, 'accelerator': 'B'},
        ]
    }
    run = read_run(write_lines(tmp_path / 'result_0.txt', lines_of(v06, ranks=1, entry=entry)))
    assert (run.num_nodes, run.num_accelerators, run.accelerator, run.framework) == (
        3,
        20,
        'A + B',
        None,
    )


@pytest.mark.parametrize(
    'nodes, ranks, layout',
    [
        # an inventory of more than was used
        (1, 8, (1, 8)),
        (4, 32, (4, 32)),
        (1, 32, (4, 32)),
        (4, 31, (4, 32)),
        (1, 287, (36, 288)),
        (1, 36, (36, 288)),
        (4, 4, (36, 288)),
        (1, 576, (36, 288)),
    ],
)
def test_ranks_precede_an_inventory(tmp_path, nodes, ranks, layout):
    run = read_run(write_lines(tmp_path / 'result_0.txt', lines_of(v06, nodes, ranks, entry=ENTRY)))
    assert (run.num_nodes, run.num_accelerators) == layout


def test_runs_on_different_accelerators_are_no_set(tmp_path):
    for k in range(2):
        entry = {'nodes': [{'num_nodes': 1, 'num_accelerators': 8, 'accelerator': f'A{k}'}]}
        write_lines(tmp_path / f'result_{k}.txt', lines_of(v06, entry=entry))
    assert load_run_sets([tmp_path])[0].refusal.startswith(
        'accelerator is A0 in result_0.txt and A1'
    )


@pytest.mark.parametrize('stated, grade', [(False, 'warning'), (True, 'note')])
def test_unreadable_description_that_may_change_counts_is_a_warning(tmp_path, stated, grade):
    path = tmp_path / 'us/results/box/resnet/result_0.txt'
    write_lines(path, run_lines(accelerators=not stated))
    (tmp_path / 'us/systems').mkdir()
    (tmp_path / 'us/systems/box.json').write_text('{')
    assert [f.grade for f in read_run(path).findings if f.kind == 'description_unreadable'] == [
        grade
    ]


@pytest.fixture
def linked(tmp_path):
    """Study with a linked system, and links to the study itself, to folders above it, and to
    nothing."""
    write_set(tmp_path / 'study/1n', 1)
    write_set(tmp_path / 'store/2n/resnet', 1, nodes=2, ranks=8)
    for name, target in [
        ('2n', '../store/2n'),
        ('self', '.'),
        ('up', '..'),
        ('again', '1n'),
        ('gone', 'nowhere'),
    ]:
        (tmp_path / 'study' / name).symlink_to(target)
    (tmp_path / 'store/2n/back').symlink_to('../../study')
    return tmp_path / 'study'


def test_linked_system_is_read_once(linked):
    assert [(s.name, s.study.name, s.num_nodes) for s in load_run_sets([linked])] == [
        ('1n', 'study', 1),
        ('2n', 'study', 2),
    ]
    assert call('check', linked).stdout.startswith('valid for their rounds: 0 of 2 sets, 2 logs\n')


@pytest.mark.parametrize('command', ['report', 'check'])
def test_files_of_other_names_are_mentioned(tmp_path, command):
    write_lines(tmp_path / '2n/run 1.log', complete(run_lines()))
    done = call(command, tmp_path)
    text = (
        'nor do its subfolders; files of other names are read if they are given, such as '
        f'{tmp_path}/2n/*.log; '
    )
    assert (done.returncode, done.stdout) == (2, '') and text in done.stderr
    assert call('report', tmp_path / '2n/run 1.log').returncode == 0


INFERENCE = [
    mllog('loadgen_version', 0, '4.0 @ 486a629ea4'),
    mllog('sut_name', 0, 'PySUT'),
    mllog('effective_test_mode', 0, 'AccuracyOnly'),
    mllog('result_validity', 0, 'VALID'),
]


@pytest.mark.parametrize(
    'lines',
    [
        INFERENCE,
        INFERENCE[1:],
        [*INFERENCE, *run_lines()],
        [mllog('power_reading', k, 4210.5) for k in range(9)],
        [mllog('model_name', 0, 'resnet50')],
    ],
)
@pytest.mark.parametrize('command', ['report', 'predict'])
def test_log_of_another_program_is_refused_in_a_line(tmp_path, command, lines):
    done = call(command, write_lines(tmp_path / 'mlperf_log_detail.txt', lines))
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert (
        'mlperf_log_detail.txt: got a log ' in done.stderr
        and 'expected one of MLPerf Training' in done.stderr
    )


def test_log_of_another_program_is_no_run_beside_others(tmp_path):
    logs = [
        write_lines(tmp_path / 'offline/performance/run_1/mlperf_log_detail.txt', INFERENCE),
        write_lines(tmp_path / 'offline/accuracy/mlperf_log_detail.txt', INFERENCE[1:]),
        write_lines(tmp_path / 'train/result_0.txt', run_lines()),
    ]
    (system,) = load_run_sets(logs)
    assert [(r.path.name, r.status) for r in system.runs] == [('result_0.txt', 'converged')]
    done = call('report', *logs)
    assert '1 of 1 run of 1 system converged' in done.stdout
    assert 'skipped 2 logs' in done.stderr and 'MLPerf Inference' in done.stderr


def test_log_of_another_program_is_no_run_of_a_folder(tmp_path):
    write_lines(tmp_path / 'result_0.txt', run_lines())
    write_lines(tmp_path / 'result_1.txt', INFERENCE)
    [run_set], others = load_logs([tmp_path])
    assert [r.path.name for r in run_set.runs] == ['result_0.txt']
    assert 'skipped 1 log' in describe_others(others)


@pytest.mark.parametrize(
    'line',
    [
        mllog('submission_org', 0, 'us'),
        mllog('init_start', 0),
        mllog('run_start', 0),
        mllog('block_start', 0),
        mllog('eval_accuracy', 0, 0.1, epoch_num=1),
        v05('run_clear_caches', 0),
        v06('cache_clear', 0),
    ],
)
def test_a_single_line_of_a_training_run_is_a_run(tmp_path, line):
    run = read_run(write_lines(tmp_path / 'result_0.txt', [*INFERENCE[1:], line]), START_S + 10**9)
    assert run.status == 'failed'


def write_tar(path, data):
    with tarfile.open(path, 'w') as packed:
        packed.addfile(tarfile.TarInfo('result_0.txt'), None)


def write_zip(path, data):
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as packed:
        packed.writestr('result_0.txt', data)


@pytest.mark.parametrize(
    'write, hint',
    [
        (lambda p, data: p.write_bytes(gzip.compress(data)), 'packed with gzip'),
        (lambda p, data: p.write_bytes(bz2.compress(data)), 'packed with bzip2'),
        (lambda p, data: p.write_bytes(lzma.compress(data)), 'packed with xz'),
        (lambda p, data: p.write_bytes(b'\x28\xb5\x2f\xfd'), 'packed with zstd'),
        (write_zip, 'packed with zip'),
        (write_tar, 'packed with tar'),
        (
            lambda p, data: p.write_text(
                json.dumps({'text': data.decode().splitlines()}, indent=1)
            ),
            'as in a notebook',
        ),
        (
            lambda p, data: p.write_text(
                '\n'.join(json.dumps({'log': f'{line}\n'}) for line in data.decode().splitlines())
            ),
            'line 1 is JSON within JSON',
        ),
    ],
)
def test_packed_and_quoted_logs_have_a_hint(tmp_path, write, hint):
    path = tmp_path / 'result_0.txt'
    write(path, '\n'.join(run_lines()).encode())
    with pytest.raises(UserError, match=hint):
        read_run(path)


def test_a_quoted_line_does_not_hide_a_log(tmp_path):
    lines = [*run_lines(), json.dumps(mllog('init_start', 0))]
    assert read_run(write_lines(tmp_path / 'result_0.txt', lines)).status == 'converged'


def test_packed_files_are_mentioned_if_a_folder_has_no_logs(tmp_path):
    (tmp_path / 'run.log.xz').write_bytes(lzma.compress(b'x'))
    done = call('report', tmp_path)
    assert done.returncode == 2 and f'such as {tmp_path}/*.xz, unpacked' in done.stderr


def test_packed_logs_of_a_folder_are_unreadable_runs_unless_they_are_unpacked_too(tmp_path):
    lines = write_lines(tmp_path / 'result_0.txt', run_lines()).read_bytes()
    for number in (0, 1):
        (tmp_path / f'result_{number}.txt.gz').write_bytes(gzip.compress(lines))
    [run_set] = load_run_sets([tmp_path])
    assert [(r.path.name, r.status) for r in run_set.runs] == [
        ('result_0.txt', 'converged'),
        ('result_1.txt.gz', 'unreadable'),
    ]
    (tmp_path / 'result_0.txt').unlink()
    (tmp_path / 'result_0.txt.gz').unlink()
    done = call('report', tmp_path)
    assert (
        done.returncode == 2
        and 'result_1.txt.gz: the file is packed with gzip; unpack it' in done.stderr
    )


@pytest.mark.parametrize(
    'make',
    [
        lambda lines: [text for line in lines for text in (line, f'DEBUG:mlperf:{line}')],
        lambda lines: [*lines, *lines],
        lambda lines: [text for line in lines for text in [line] * 3],
        lambda lines: [*lines, *lines[:-1]],
    ],
)
@pytest.mark.parametrize('line, ranks', [(v06, 1), (v06, 4), (v05, 1), (v05, 4)])
def test_copies_of_lines_by_another_logger_are_not_ranks_or_nodes(tmp_path, line, ranks, make):
    lines = lines_of(line, nodes=1, ranks=ranks)
    whole, copied = (
        read_run(write_lines(tmp_path / name / 'result_0.txt', log))
        for name, log in (('whole', lines), ('copied', make(lines)))
    )
    for fact in (
        'num_ranks',
        'num_nodes',
        'num_accelerators',
        'global_batch_size',
        'status',
        'epochs_to_converge',
    ):
        assert getattr(copied, fact) == getattr(whole, fact), fact


def test_evaluation_that_is_ignored_is_called_so(tmp_path):
    lines = [
        *run_lines()[:-1],
        mllog('eval_accuracy', 22, 0.3, epoch_num=2),
        mllog('eval_accuracy', 22, 0.8),
        mllog('eval_accuracy', 22, 0.8, samples_count=3_000_000),
        mllog('eval_accuracy', 22, 1.5, epoch_num=3),
    ]
    run = read_run(write_lines(tmp_path / 'result_0.txt', lines), START_S + 10**9)
    texts = [f.text for f in run.findings if 'eval_accuracy' in f.text]
    assert run.curve == ((1, 0.5), (2, 0.76)) and len(texts) == 3
    assert all('ignored' in text for text in texts)
