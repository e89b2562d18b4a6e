"""Logs of other people: lines shared with other output, lost lines, descriptions, linked folders,
other file names; logs without an end. The logs in tests/logs are more of them."""

import bz2
import fcntl
import gzip
import io
import json
import lzma
import os
import platform
import tracemalloc
import zipfile

import pytest
from helpers import call, json_table, write_files
from lines import START_S, complete, mllog, run_lines, v05, v06, write_lines, write_set
from numbered import tar_of

from mlperf_rn50.analysis.sets.defects import set_findings
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.check.judge import check_log
from mlperf_rn50.mllog.events import decode_events
from mlperf_rn50.mllog.findings import make_finding
from mlperf_rn50.mllog.read.reader import read_run

NODES = {'num_nodes': 36, 'num_accelerators': 8, 'accelerator': 'Tesla V100'}
ENTRY = {'framework': 'MXNet 1.4', 'nodes': [NODES]}


@pytest.fixture
def read(tmp_path):
    """Function that writes lines to result_0.txt and reads the run."""

    def read(lines, name='result_0.txt', now_s=START_S + 10**9):
        return read_run(write_lines(tmp_path / name, lines), now_s)

    return read


def lines_of(line, nodes=1, ranks=8, entry=None, batch=32):
    """Return a log in the format of v0.5 or v0.6, with a line of each node and rank."""
    entries = [line('submission_entry', -4.0, entry)] if entry else []
    if line is v06:
        return [
            *(v06('cache_clear', k - 5.0) for k in range(nodes)),
            *entries,
            *(v06('init_start', k / 1e3) for k in range(ranks)),
            v06('run_start', 1.0),
            v06('epoch_start', 2.0, epoch_num=1),
            v06('eval_accuracy', 12.0, 0.76, epoch_num=1),
            v06('run_stop', 13.0, status='success'),
        ]
    return [
        *(v05('run_clear_caches', k - 5.0) for k in range(nodes)),
        *(v05('run_set_random_seed', k / 1e3, k) for k in range(ranks)),
        v05('run_start', 1.0),
        v05('input_batch_size', 1.0, batch),
        v05('train_epoch', 2.0, 0),
        v05('eval_accuracy', 12.0, {'epoch': 0, 'value': 0.76}),
        v05('run_stop', 13.0),
        v05('run_final', 13.0),
    ]


# --- lines


@pytest.mark.parametrize('value', [3, 'none', 'a}', {'a': [0.5]}, None])
@pytest.mark.parametrize(
    'line',
    [
        mllog,
        lambda *event: mllog(*event).replace(' ', '', 1),
        v06,
        v05,
        lambda *event: v05(*event).replace('.000000000', ''),
    ],
)
def test_event_followed_by_other_output_counts(line, value):
    for tail in (
        '\x1b[0m',
        ' | 7 images/s',
        ' images: 7',
        '"}]' if value not in (3, None) else ' ',
    ):
        (event,) = decode_events(f'1%\x1b[32m{line("k", 0, value)}{tail}')
        assert (event.key, event.value, event.time_s) == ('k', value, START_S)


def test_events_that_cannot_be_decoded_are_stated_with_the_reason(tmp_path):
    lines = ['shell', ':::MLLOG {"key": "run_start", "metadata": {}}']
    path = write_lines(tmp_path / 'result_0.txt', lines)
    for function in (read_run, check_log):
        with pytest.raises(UserError, match=r'can be decoded \(line 2: no time_ms\); expected lin'):
            function(path)


@pytest.mark.parametrize(
    'changes, target, status',
    json_table("""
[{"train.target_accuracy": [0.98, 0.7]}, {}]                                    | 0.7  | "converged"
[{"train.target_accuracy": [0.98, 0.7]}, {"train.target_accuracy": [0.7, 0.9]}] | 0.9  | "failed"
[{"train.target_accuracy": [0.98, "x"]}]                                        | 0.98 | "failed"
["train.target_accuracy"]                                                       | 0.98 | "failed"
"""),
)
def test_target_of_the_last_resume_that_changed_it_counts(read, changes, target, status):
    *lines, _ = run_lines((0.75, 0.76), target=0.98)
    resume = {'epoch_num': 1, 'clock_s': 22.0}
    lines += [mllog('run_resumed', 30, 1, **resume, changed=changed) for changed in changes]
    lines += [
        mllog('eval_accuracy', 40, 0.77, epoch_num=3),
        mllog('run_stop', 41, status='success'),
    ]
    run = read(lines)
    assert (run.target_accuracy, run.status) == (target, status)
    assert not any(f.kind == 'trained_past_target' for f in run.findings)


def test_block_that_is_repeated_less_often_than_other_lines_keeps_its_length(read):
    lines = [mllog('run_start', 0)] * 3 + [mllog('block_start', 0, first_epoch_num=1)] * 2
    lines += [mllog('eval_accuracy', 20, 0.5, epoch_num=0), mllog('run_stop', 73, status='aborted')]
    assert [s.num_epochs for s in read(lines).segments] == [1]


def test_resume_before_a_block_that_was_repeated(read):
    block = {'first_epoch_num': 5, 'epoch_count': 1}
    lines = run_lines((0.5,), period=4, status=None)
    lines += [mllog('block_start', 42, **block)]
    lines += [
        mllog('run_resumed', 50, 1, epoch_num=5, clock_s=42.5),
        mllog('block_start', 51, **block),
    ]
    lines += [mllog('run_resumed', 60, 1, epoch_num=3, clock_s=25.0)]
    run = read(lines)
    assert [s.first_epoch for s in run.segments] == [1, 2]


def test_epoch_that_began_after_a_checkpoint_at_its_start_does_not_contradict_it(read):
    """The next epoch may have to wait until the checkpoint before is written, here for 4 s."""
    lines = run_lines((0.5, 0.6), status=None)
    lines += [mllog('epoch_start', 26, epoch_num=3)]
    lines += [mllog('run_resumed', 40, 2, epoch_num=3, clock_s=22.0)]
    run = read(lines)
    assert [r.clock_s for r in run.resumes] == [22.0]
    assert not [f for f in run.findings if 'clock' in f.kind]


def test_log_of_a_run_that_initialises_is_that_of_the_newer_format(read):
    lines = [line for line in run_lines(()) if '"run_st' not in line]
    run = read([*lines, v05('run_start', -5), v05('opt_name', -4, 'SGD with Momentum')])
    assert (run.opt_name, run.division) == ('sgd', 'closed')


@pytest.mark.parametrize('is_resumed', [False, True])
def test_end_of_an_attempt_before_a_resume_is_not_that_of_the_run(tmp_path, is_resumed):
    """A kill between run_stop and the last line of metrics.jsonl leaves only the earlier end."""
    records = [{'event': 'end', 'status': 'interrupted', 'time_to_train_s': 1.0}]
    records += [{'event': 'resumed', 'step': 4}] * is_resumed
    lines = ''.join(f'{json.dumps(r)}\n' for r in records)
    write_files(tmp_path, {'metrics.jsonl': lines})
    run = read_run(write_lines(tmp_path / 'result_0.txt', run_lines((0.5, 0.8))))
    assert run.status == ('converged' if is_resumed else 'failed')


# --- numbers of nodes, ranks and accelerators


@pytest.mark.parametrize(
    'platform, nodes, is_flagged',
    [('8xH100', 1, False), ('16xH100', 2, False), ('2xbox', 2, False), ('4xbox', 2, True)],
)
def test_platform_may_begin_with_the_number_of_accelerators(read, platform, nodes, is_flagged):
    counts = {'number_of_nodes': nodes, 'accelerators_per_node': 8}
    run = read(run_lines(platform=platform, ranks=8 * nodes, **counts))
    assert (run.num_nodes, run.num_accelerators) == (nodes, 8 * nodes)
    assert [f.kind for f in run.findings if f.kind == 'counts_differ'] == (
        ['counts_differ'] * is_flagged
    )


@pytest.mark.parametrize(
    'lost, settled',
    json_table("""
1 | [["num_ranks", 23, "23 seed lines", 24, 4]]
4 | [["num_nodes", 36, "entry.json", 3, 4], ["num_ranks", 20, "20 seed lines", 24, 4], \
["num_accelerators", 288, "entry.json", 24, 4]]
"""),
)
def test_other_logs_of_a_set_settle_counts_that_a_log_contradicts(tmp_path, lost, settled):
    folder = tmp_path / 'results/box/resnet'
    for k in range(5):
        write_lines(folder / f'result_{k}.txt', lines_of(v05, 3, 24 - lost * (k == 0)))
    (folder.parent / 'entry.json').write_text(json.dumps(ENTRY))
    (system,) = load_run_sets([tmp_path])
    assert system.refusal is None
    counts = [(r.num_nodes, r.num_ranks, r.num_accelerators) for r in system.runs]
    assert counts == [(3, 24, 24)] * 5 and {r.global_batch_size for r in system.runs} == {24 * 32}
    found = set_findings(system)
    expected = {make_finding('count_settled', None, *each).text for each in settled}
    assert {f.text for f in found if f.kind == 'count_settled'} == expected
    assert not any('288 is used' in f.text or '36 is used' in f.text for f in found)


@pytest.mark.parametrize(
    'entry',
    [
        ENTRY,
        json.dumps(ENTRY),
        str({**ENTRY, 'nodes': str(NODES)}),
        str({'os': 'x' * 2000, **ENTRY}),
    ],
)
def test_facts_in_a_log_precede_its_description(read, tmp_path, entry):
    counts = {'number_of_nodes': 1, 'accelerators_per_node': 1}
    description = json.dumps({**counts, 'framework': 'TF', 'submitter': 'us'})
    write_files(tmp_path, {'us/systems/box.json': description})
    run = read(lines_of(v06, ranks=1, entry=entry), 'us/results/box/resnet/result_0.txt')
    assert (run.num_nodes, run.num_accelerators, run.org) == (36, 288, 'us')
    assert (run.accelerator, run.framework) == ('Tesla V100', 'MXNet 1.4')


def test_several_kinds_of_nodes_in_a_log_are_added(read):
    names = 'num_nodes', 'num_accelerators', 'accelerator'
    entry = {'nodes': [dict(zip(names, values)) for values in (('2', '8', 'A'), (1, 4, 'B'))]}
    run = read(lines_of(v06, ranks=1, entry=entry))
    assert (run.num_nodes, run.num_accelerators, run.accelerator) == (3, 20, 'A + B')
    assert run.framework is None


@pytest.mark.parametrize(
    'nodes, ranks, layout',
    json_table("""
# an inventory of more than was used
1 | 8   | [1, 8]
4 | 32  | [4, 32]
1 | 32  | [4, 32]
4 | 31  | [4, 32]
1 | 287 | [36, 288]
1 | 36  | [36, 288]
4 | 4   | [36, 288]
1 | 576 | [36, 288]
"""),
)
def test_ranks_precede_an_inventory(read, nodes, ranks, layout):
    run = read(lines_of(v06, nodes, ranks, entry=ENTRY))
    assert [run.num_nodes, run.num_accelerators] == layout


def test_inventory_with_more_nodes_than_accelerators_is_read(read):
    """Five of its seven nodes serve parameters."""
    nodes = [{**NODES, 'num_nodes': n, 'num_accelerators': a} for n, a in ((2, 1), (5, 0))]
    run = read(lines_of(v06, nodes=1, ranks=3, entry={**ENTRY, 'nodes': nodes}))
    assert run.num_nodes == 7


@pytest.mark.parametrize('stated, grade', [(False, 'warning'), (True, 'note')])
def test_unreadable_description_that_may_change_counts_is_a_warning(read, tmp_path, stated, grade):
    write_files(tmp_path, {'us/systems/box.json': '{'})
    run = read(run_lines(accelerators=not stated), 'us/results/box/resnet/result_0.txt')
    assert [f.grade for f in run.findings if f.kind == 'description_unreadable'] == [grade]


# --- files and folders


def test_linked_system_is_read_once(tmp_path):
    """Study with a linked system, and links to the study itself, to folders above it, and to
    nothing."""
    study = write_set(tmp_path / 'study/1n', 1).parent
    write_set(tmp_path / 'store/2n/resnet', 1, nodes=2, ranks=8)
    links = {'2n': '../store/2n', 'self': '.', 'up': '..', 'again': '1n', 'gone': 'nowhere'}
    for name, target in links.items():
        (study / name).symlink_to(target)
    (tmp_path / 'store/2n/back').symlink_to('../../study')
    found = [(s.name, s.study.name, s.num_nodes) for s in load_run_sets([study])]
    assert found == [('1n', 'study', 1), ('2n', 'study', 2)]
    assert '0 of 2 sets (2 logs)\n' in call('check', study).stdout


@pytest.mark.parametrize('command', ['report', 'check'])
@pytest.mark.parametrize('name, hint', [('2n/run 1.log', '2n/*.log; '), ('a.xz', '*.xz, unpacked')])
def test_files_of_other_names_are_mentioned(tmp_path, command, name, hint):
    write_lines(tmp_path / name, complete(run_lines()))
    done = call(command, tmp_path)
    hint = f'files of other names are read if they are given, such as {tmp_path}/{hint}'
    assert (done.returncode, done.stdout) == (2, '') and hint in done.stderr
    assert call('report', tmp_path / name).returncode == 0


INFERENCE = [
    mllog('loadgen_version', 0, '4.0 @ 486a629ea4'),
    mllog('sut_name', 0, 'PySUT'),
    mllog('result_validity', 0, 'VALID'),
]


@pytest.mark.parametrize('lines', [INFERENCE[1:], [*INFERENCE, *run_lines()]])
@pytest.mark.parametrize('command', ['report', 'predict'])
def test_log_of_another_program_is_refused_in_a_line(tmp_path, command, lines):
    done = call(command, write_lines(tmp_path / 'detail.txt', lines))
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert 'detail.txt: got a log ' in done.stderr
    assert 'expected one of MLPerf Training' in done.stderr


@pytest.mark.parametrize(
    'line',
    [
        mllog('submission_org', 0, 'us'),
        mllog('init_start', 0),
        mllog('block_start', 0),
        v05('run_clear_caches', 0),
        v06('cache_clear', 0),
    ],
)
def test_a_single_line_of_a_training_run_is_a_run(read, line):
    assert read([*INFERENCE[1:], line]).status == 'failed'


def zipped(log: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w', zipfile.ZIP_DEFLATED) as packed:
        packed.writestr('result_0.txt', log)
    return buffer.getvalue()


def quoted(log: bytes) -> bytes:
    return b'\n'.join(json.dumps({'log': line.decode()}).encode() for line in log.splitlines())


@pytest.mark.parametrize(
    'pack, hint',
    [
        (gzip.compress, 'packed with gzip; unpack it'),
        (bz2.compress, 'packed with bzip2'),
        (lzma.compress, 'packed with xz'),
        (lambda log: b'\x28\xb5\x2f\xfd', 'packed with zstd'),
        (zipped, 'packed with zip'),
        (lambda log: tar_of({'result_0.txt': log}), 'packed with tar'),
        (lambda log: json.dumps([log.decode()], indent=1).encode(), 'as in a notebook'),
        (quoted, 'line 1 is JSON within JSON'),
        (lambda log: log.decode().encode('utf-16'), 'UTF-16; convert it to UTF-8'),
        (lambda log: f'\ufeff{log.decode()}'.encode('utf-16-be'), 'UTF-16; convert it'),
    ],
)
def test_packed_and_quoted_logs_have_a_hint(tmp_path, pack, hint):
    path = write_lines(tmp_path / 'result_0.txt', run_lines())
    path.write_bytes(pack(path.read_bytes()))
    with pytest.raises(UserError, match=hint):
        read_run(path)


def test_a_quoted_line_does_not_hide_a_log(read):
    assert read([*run_lines(), json.dumps(mllog('init_start', 0))]).status == 'converged'


def test_memory_does_not_grow_with_the_log(tmp_path):
    path = tmp_path / 'result_0.txt'
    with open(path, 'w') as f:
        f.write('x' * 9_000_000 + '\n')
        for epoch in range(10_100):
            f.write(mllog('eval_accuracy', epoch, 0.5, epoch_num=epoch) + '\n')
            f.write(mllog(f'opt_{epoch}', 0, 'x' * 400) + '\n')
        f.write(':::MLLOG ' + '[' * 2_000_000)
    tracemalloc.start()
    run = read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.evaluations) == 10_000 and len(run.findings) < 200 and len(run.optimizer) == 64
    assert run.evaluations[0].line == 2 and peak < 12_000_000


# --- a log without an end, which belongs to a running or a killed run


@pytest.fixture
def unended(tmp_path):
    """Function that writes a log with its last event at 22 s and its modification time `written_s`
    later."""

    def unended(written_s=0.0, **keys):
        path = write_lines(tmp_path / 'result_0.txt', run_lines(status=None, **keys))
        os.utime(path, (START_S + 22 + written_s,) * 2)
        return path

    return unended


def test_run_that_is_still_starting_breaks_no_rule(read):
    lines = run_lines()
    starting = lines[: next(k for k, line in enumerate(lines) if 'run_start' in line)]
    run = read(starting, now_s=START_S)
    assert (run.status, run.errors) == ('running', ())


def test_only_a_running_run_has_an_age(unended, read):
    run = read_run(unended(accuracies=(0.5, 0.4)), now_s=START_S + 82)
    assert (run.age_s, run.last_epoch, run.best_accuracy) == (60.0, 2, 0.5)
    assert run.epochs_to_converge is run.time_to_train_s is None
    assert read(run_lines(), now_s=START_S + 22).age_s is None


@pytest.mark.parametrize('k', [0, 3])
def test_lock_of_a_run_decides_the_status(unended, k):
    log = unended()
    log = log.rename(log.with_name(f'result_{k}.txt'))
    path = log.with_name(f'.run_{k}.lock')
    path.write_text(f'process 7 on {platform.node()}\n')
    with open(path, 'rb') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = read_run(log, now_s=START_S + 10**7)
        assert run.status == 'running' and run.age_s > 10**6
    assert read_run(log, now_s=START_S + 23).status == 'failed'  # released on this machine
    path.write_text('process 7 on other-machine\n')
    assert read_run(log, now_s=START_S + 23).status == 'running'
    assert read_run(log, now_s=START_S + 10**7).status == 'failed'


def test_lock_that_is_not_a_file_does_not_block_and_reading_leaves_a_lock_free(unended):
    log = unended()
    path = log.with_name('.run_0.lock')
    os.mkfifo(path)
    assert read_run(log, now_s=START_S + 30).status == 'running'
    path.unlink()
    path.touch()
    read_run(log)
    with open(path, 'a+b') as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
