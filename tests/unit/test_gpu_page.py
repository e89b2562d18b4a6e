"""What can be known of the tests on GPUs without one: their page, their comparisons, and where they do not run."""
import json
import os
import pty
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from gpu import page
from gpu.compare import compare_block, distance, distances, from_layout, to_layout, too_far
from gpu.machine import relevant_variables, told
from gpu.streams import overwritten, read_late
from helpers import ROOT, run
from mxnet.gluon import nn

EXPECTATIONS = json.loads((ROOT / 'tests/gpu/expectations.json').read_text())
A100 = {'kind': 'machine', 'dry_run': False, 'gpus': [{'name': 'NVIDIA A100-SXM4-40GB', 'driver_version': '535.1',
                                                      'mig.mode.current': 'Disabled'}]}
HOSTILE = '<script>x</script> | `a` **b** [c](javascript:d) \x1b[31m\nnext ![e](http://f) # g'


def write(folder, *records, name='figures.jsonl'):
    (folder / name).write_text(''.join(json.dumps(r) + '\n' for r in records))


def figure(name='speed', value=3000.0, **keys):
    return {'kind': 'figure', 'test': 't', 'name': name, 'value': value, 'unit': 'images/s per GPU', **keys}


def make(*records, doctor=None):
    return page.make_result(list(records), doctor, EXPECTATIONS, 0.0)


def test_a_page_has_the_card_its_figures_and_what_did_not_run(tmp_path):
    write(tmp_path, A100, name='machine.jsonl')
    write(tmp_path, figure(expects='published'))
    write(tmp_path, {'kind': 'tests', 'names': ['a', 'b', 'c']}, {'kind': 'test', 'name': 'a', 'outcome': 'passed',
                                                                  'reason': '', 'seconds': 1.5},
          {'kind': 'test', 'name': 'b', 'outcome': 'failed', 'reason': 'too far', 'seconds': 2}, name='outcomes.jsonl')
    checks = [{'name': 'GPU', 'status': 'ok', 'found': '1 x A100'}]
    (tmp_path / 'doctor.json').write_text(json.dumps({'checks': checks}))
    made = page.write_page(tmp_path, 1767225600.0)
    assert [p.name for p in made] == [f'gpu_NVIDIA-A100-SXM4-40GB_20260101.{e}' for e in ('json', 'md')]
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in made)
    result, text = json.loads(made[0].read_text()), made[1].read_text()
    assert result['counts'] == {'passed': 1, 'failed': 1, 'error': 0, 'not run': 1}
    [found] = result['figures']
    assert (found['low'], found['high']) == tuple(EXPECTATIONS['kinds']['A100 SXM 40GB']['bench_train'])
    assert found['verdict'] == 'within' and '| 3,000 | images/s per GPU | 2506 to 3556, published' in text
    assert 'Tests: 1 passed, 1 failed, 1 not run.' in text and 'too far' in text and '| GPU | ok | 1 x A100 |' in text
    assert 'the process that ran it ended before' in text and 'DRY RUN' not in text


@pytest.mark.parametrize('value, low, high, verdict', [
    (1, 1, 2, 'within'), (2, 1, 2, 'within'), (0.5, 1, 2, 'below'), (2.5, 1, 2, 'above'), (5, 1, None, 'within'),
    (5, None, 4, 'above'), (5, None, None, ''), ('much', 1, 2, ''), (True, 1, 2, ''), (None, 1, 2, ''),
    (float('nan'), 1, 2, 'no number')])
def test_where_a_figure_lies(value, low, high, verdict):
    assert page.judge(value, low, high) == verdict


@pytest.mark.parametrize('name, kind', [
    ('Tesla V100-SXM2-16GB', 'V100'), ('Tesla V100S-PCIE-32GB', 'V100'), ('NVIDIA A100-SXM4-40GB', 'A100 SXM 40GB'),
    ('NVIDIA A100-SXM4-80GB', 'A100 SXM 80GB'), ('NVIDIA A100 80GB PCIe', 'A100 PCIe'), ('NVIDIA A10', None),
    ('NVIDIA A100-PCIE-40GB', 'A100 PCIe'), ('NVIDIA H100 80GB HBM3', None), ('', None)])
def test_kinds_of_cards(name, kind):
    assert page.kind_of(name) == kind


@pytest.mark.parametrize('machine', [
    {'gpus': [{'name': 'NVIDIA H100 80GB HBM3'}]}, {'gpus': []}, {'gpus': 'not found'}, {},
    {'gpus': [{'name': 'Tesla V100-SXM2-16GB'}], 'dry_run': True},
    {'gpus': [{'name': 'NVIDIA A100-SXM4-40GB', 'mig.mode.current': 'Enabled'}]}])
def test_what_has_no_published_figure_is_held_against_none(machine):
    [found] = make({'kind': 'machine', **machine}, figure(expects='published'))['figures']
    assert found['verdict'] == '' and found['source'] == 'no published figure of this card'


def test_hostile_texts_are_text(tmp_path):
    write(tmp_path, {**A100, 'gpus': [{'name': '../' + HOSTILE}], 'variables': {HOSTILE: HOSTILE}},
          figure(HOSTILE, HOSTILE, source=HOSTILE), {'kind': 'test', 'name': HOSTILE, 'outcome': 'failed',
                                                     'reason': HOSTILE * 100, 'seconds': None})
    made = page.write_page(tmp_path, time.time())
    text = made[1].read_text()
    assert made[1].parent == tmp_path and '..' not in made[1].name and len(made[1].name) < 90
    assert '<' not in text and '\x1b' not in text and 'http://' not in text
    rows = [line for line in text.splitlines() if line.startswith('|')]
    assert {line.replace(r'\|', '').count('|') for line in rows if 'script' in line} <= {3, 5, 6}
    assert [line for line in rows if re.search(r'(?<!\\)[][*`]', line)] == [] and len(rows) > 6
    assert max(map(len, rows)) < 3000


def test_a_torn_or_odd_record_does_no_harm(tmp_path):
    (tmp_path / 'figures.jsonl').write_text('{"kind": "figure", "name": "x", "value": NaN}\n[1]\n3\n{"kind": "fig')
    (tmp_path / 'doctor.json').write_text('{"checks": 3')
    made = page.write_page(tmp_path, 0.0)
    [found] = json.loads(made[0].read_text(), parse_constant=pytest.fail)['figures']
    assert found['value'] == 'NaN' and 'It said nothing that can be read.' in made[1].read_text()
    assert made[0].name == 'gpu_no-GPU_19700101.json'


@pytest.mark.parametrize('lines', [
    '[' * 100_000, '{"kind": "machine", "load": Infinity}', '{"kind": "tests", "names": null}',
    '{"kind": "test", "name": "a", "outcome": "passed", "seconds": NaN}',
    *(f'{{"kind": "figure", "name": "x", "value": 1, "{key}": {value}}}'
      for key in ('low', 'high', 'value') for value in ('"x"', '[1]', 'NaN', '-Infinity', '9' * 400))])
def test_a_page_is_made_of_whatever_is_there(tmp_path, lines):
    (tmp_path / 'figures.jsonl').write_text(lines)
    (tmp_path / 'doctor.json').write_text('[' * 100_000)
    made = page.write_page(tmp_path, 0.0)
    json.loads(made[0].read_text(), parse_constant=pytest.fail)
    assert 'It said nothing that can be read.' in made[1].read_text()


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / 'x.md'
    page.write_atomically(target, 'old')
    monkeypatch.setattr(page.os, 'replace', lambda *a: (_ for _ in ()).throw(OSError('full')))
    with pytest.raises(OSError, match='full'):
        page.write_atomically(target, 'new')
    assert target.read_text() == 'old' and list(tmp_path.iterdir()) == [target]


def test_a_dry_run_says_so_first_and_in_its_name(tmp_path):
    write(tmp_path, {**A100, 'dry_run': True})
    made = page.write_page(tmp_path, 0.0)
    assert made[1].name == 'gpu_dry_run_19700101.md' and page.DRY_RUN in made[1].read_text().splitlines()[2]


def test_the_page_needs_nothing_but_python(tmp_path):
    write(tmp_path, A100)
    done = run([sys.executable, '-I', '-S', ROOT / 'tests/gpu/page.py', tmp_path])
    assert done.returncode == 0, done.stderr
    assert 'to send back:' in done.stdout


def test_variables_that_open_something_stay_here():
    assert relevant_variables({'HOROVOD_SECRET_KEY': 'x', 'MXNET_A': '1', 'HOME': '/root', 'NCCL_DEBUG': 'INFO'}) == {
        'MXNET_A': '1', 'NCCL_DEBUG': 'INFO'}
    assert told(lambda: 3) == 3
    assert told(lambda: {}['a']) == "not found: KeyError: 'a'"


def test_distances():
    a = np.array([3.0, 4.0])
    assert distance(a, a) == 0 and distance(a * 1.1, a) == pytest.approx(0.1)
    assert distance(np.array([3.0, np.nan]), a) == distance(a[:1], a) == float('inf')
    assert distance(a, 0 * a) == 5
    found = distances({'x': a, 'y': a}, {'x': a, 'z': a})
    assert found == {'x': 0, 'z': float('inf'), 'y': float('inf')}
    assert too_far({'x': 0.1, 'y': 0.3, 'z': float('nan')}, 0.2).keys() == {'y', 'z'}
    assert too_far({'x': 0.1, 'y': 0.3}, {'x': 0.05, 'y': 0.5}) == {'x': 0.1}


def test_layouts_are_each_others_inverse():
    a = np.arange(120).reshape(2, 3, 4, 5)
    assert to_layout(a, 'NHWC').shape == (2, 4, 5, 3) and to_layout(a[0, 0], 'NHWC').shape == (4, 5)
    np.testing.assert_array_equal(from_layout(to_layout(a, 'NHWC'), 'NHWC'), a)
    np.testing.assert_array_equal(to_layout(a, 'NCHW'), a)


def test_a_layer_that_computes_something_else_is_found():
    def norm(epsilon):
        return lambda layout: nn.BatchNorm(axis=layout.index('C'), in_channels=4, epsilon=epsilon)
    same = compare_block(norm(1e-5), (4, 4, 3, 3), 'NHWC', 'float32', mx.cpu())
    other = compare_block(norm(1e-1), (4, 4, 3, 3), 'NHWC', 'float32', mx.cpu(), norm(1e-5))
    assert too_far(same, 1e-5) == {}
    assert {'output', 'gradient of the input', 'gradient of gamma 0'} <= too_far(other, 1e-3).keys()


def test_a_pipeline_that_uses_memory_again_too_early_is_found():
    """A stand-in whose batches all share memory, written again while the last one waits to be read."""
    memory = np.zeros(96, np.float32)
    shared = mx.nd.from_numpy(memory.reshape((2, 3, 4, 4)), zero_copy=True)

    def batches(is_shared):
        for step in range(6):
            if is_shared:
                memory[:] = np.repeat([2 * step, 2 * step + 1], 48)
            images = shared if is_shared else mx.nd.array(
                np.broadcast_to(np.array([2 * step, 2 * step + 1]).reshape((2, 1, 1, 1)), (2, 3, 4, 4)))
            yield SimpleNamespace(images=images, labels=mx.nd.array([2 * step, 2 * step + 1], dtype='int32'))
    expected = [[2 * s, 2 * s + 1] for s in range(6)]
    assert overwritten(read_late(batches(False), 6, mx.cpu(), 32), expected) == []
    wrong = overwritten(read_late(batches(True), 6, mx.cpu(), 1024), expected)
    assert wrong and wrong[0].startswith('batch 0: images ')
    assert overwritten([([None], [1])], [[1]]) == ['batch 0: images [None], labels [1], expected [1]']


def make_checkout(folder, setup):
    """The scripts that prove the program on GPUs, with a set-up that does something else."""
    for name in ('launch/test.sh', 'tests/gpu/run.sh'):
        (folder / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / 'launch/setup.sh').write_text(f'#!/bin/bash\n{setup}\n')
    (folder / 'launch/setup.sh').chmod(0o755)
    return folder


def clean(**variables):
    """The environment without what asks for tests on a GPU."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith('MLPERF_RN50_')}, **variables}


@pytest.mark.parametrize('nvidia_smi, why', [
    (None, 'there is no nvidia-smi, so no NVIDIA driver'),
    ('#!/bin/sh\necho "NVIDIA-SMI has failed" >&2; exit 9\n', 'nvidia-smi finds none'),
    ('#!/bin/sh\necho "No devices were found"\n', 'nvidia-smi finds none')])
def test_without_a_gpu_it_says_so_in_one_line_and_sets_up_nothing(tmp_path, nvidia_smi, why):
    checkout, tools = make_checkout(tmp_path / 'checkout', 'touch was_set_up'), tmp_path / 'bin'
    tools.mkdir()
    for name in ('bash', 'dirname', 'timeout', 'env'):
        (tools / name).symlink_to(next(p for p in (f'/usr/bin/{name}', f'/bin/{name}') if os.path.exists(p)))
    if nvidia_smi:
        (tools / 'nvidia-smi').write_text(nvidia_smi.replace('/bin/sh', '/bin/bash'))
        (tools / 'nvidia-smi').chmod(0o755)
    before = sorted(checkout.rglob('*'))
    done = run(['bash', checkout / 'launch/test.sh', '--gpu'], env={'PATH': str(tools)})
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr == f'launch/test.sh --gpu: no GPU here: {why}; nothing was set up or run\n'
    assert sorted(checkout.rglob('*')) == before


@pytest.mark.parametrize('made, imports, given, expected', [
    ('', False, None, 'cu117'), ('', True, None, 'ngc'), ('cpu x', True, None, 'ngc'),
    ('cu112 x', False, None, 'cu112'), ('', True, 'cu112', 'cu112')])
def test_the_variant_that_is_set_up(tmp_path, made, imports, given, expected):
    """Up to the set-up, which says what it was asked for and fails."""
    make_checkout(tmp_path, 'echo "variant $MLPERF_RN50_VARIANT"; exit 3')
    text, tools = (tmp_path / 'tests/gpu/run.sh').read_text(), tmp_path / 'bin'
    assert 'PATH=/usr/local/bin:/usr/bin:/bin python3' in text
    (tmp_path / 'tests/gpu/run.sh').write_text(text.replace('PATH=/usr/local/bin:/usr/bin:/bin python3', 'python3'))
    (tmp_path / '.venv/.setup').mkdir(parents=True)
    tools.mkdir()
    if made:
        (tmp_path / '.venv/.setup/made').write_text(made + '\n')
    for path, body in ((tools / 'nvidia-smi', 'echo "GPU 0: NVIDIA A100"; for i in {1..9999}; do echo more; done'),
                       (tools / 'python3', f'exit {0 if imports else 1}')):
        path.write_text(f'#!/bin/bash\n{body}\n')
        path.chmod(0o755)
    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu'],
               env=clean(PATH=f'{tools}:{os.environ["PATH"]}', **({'MLPERF_RN50_VARIANT': given} if given else {})))
    # Not 2, which is what it ends with where there is no GPU.
    assert (done.returncode, done.stdout) == (1, f'variant {expected}\n'), done.stderr


@pytest.mark.parametrize('capability, variant, is_refused', [
    ('9.0', 'cu117', True), ('12.0', 'cu112', True), ('8.9', 'cu117', False), ('9.0', 'ngc', False)])
def test_a_card_that_the_wheels_have_no_code_for_is_refused_first(tmp_path, capability, variant, is_refused):
    make_checkout(tmp_path, 'exit 3')
    smi = tmp_path / 'bin/nvidia-smi'
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/bash\n[ "$1" = -L ] && echo "GPU 0: H" || echo "NVIDIA H100, {capability}"\n')
    smi.chmod(0o755)

    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu'],
               env=clean(PATH=f'{smi.parent}:{os.environ["PATH"]}', MLPERF_RN50_VARIANT=variant))

    assert done.returncode == (2 if is_refused else 1)
    assert ('NVIDIA H100: the MXNet of' in done.stderr and done.stderr.count('\n') == 1) is is_refused, done.stderr


def make_proof(folder, nvidia_smi, pytest_does):
    """A checkout with two files of tests on GPUs and programs that stand in for those it calls; its environment."""
    make_checkout(folder, 'true')
    tools = folder / '.venv/bin'
    tools.mkdir(parents=True)
    for name in ('a', 'b'):
        (folder / f'tests/gpu/test_{name}.py').touch()
    for name, body in {'nvidia-smi': nvidia_smi, 'python': f'echo "python $*" >>{folder}/said; {pytest_does}',
                       'pytest': 'exit 1'}.items():  # the container's pytest, which does not see what .venv has
        (tools / name).write_text(f'#!/bin/bash\n{body}\n')
        (tools / name).chmod(0o755)
    return clean(PATH=f'{tools}:{os.environ["PATH"]}', MLPERF_RN50_GPU_RESULT=str(folder / 'out'),
                 MLPERF_RN50_VARIANT='cu117')


@pytest.mark.parametrize('ends, expected', [((0, 0), 0), ((0, 1), 1), ((139, 0), 1), ((5, 0), 0)])
def test_a_file_that_fails_or_crashes_stops_neither_the_others_nor_the_page(tmp_path, ends, expected):
    how = f'case $* in *test_a.py*) exit {ends[0]} ;; *test_b.py*) exit {ends[1]} ;; esac'
    environment = make_proof(tmp_path, 'echo "GPU 0: NVIDIA A100"', how)
    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu', '-x'], env=environment)
    assert done.returncode == expected, done.stderr
    said = (tmp_path / 'said').read_text().splitlines()
    assert [said[0], *said[2:]] == [
        f'python tests/gpu/machine.py {tmp_path}/out', 'python -m pytest tests/gpu/test_a.py -x',
        'python -m pytest tests/gpu/test_b.py -x', f'python tests/gpu/page.py {tmp_path}/out']
    assert said[1].startswith('python -m mlperf_rn50 doctor') and '--train.device' not in said[1]
    again = run(['bash', tmp_path / 'launch/test.sh', '--gpu'], env=environment)
    assert again.returncode == 2 and f'{tmp_path}/out has files in it' in again.stderr


def test_interrupted_at_a_terminal_it_ends_with_its_page(tmp_path):
    env = make_proof(tmp_path, 'echo "GPU 0: NVIDIA A100"', 'case $* in *test_a.py*) echo ready; sleep 30 ;; esac')
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that a shell started in the background ignore it
        os.execvpe('bash', ['bash', str(tmp_path / 'launch/test.sh'), '--gpu'], env)
    seen = b''
    while b'ready' not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b'\x03')
    with suppress(OSError):  # the other end is closed
        while os.read(terminal, 1000):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    said = (tmp_path / 'said').read_text().splitlines()
    assert said[2:] == ['python -m pytest tests/gpu/test_a.py', f'python tests/gpu/page.py {tmp_path}/out']


def test_a_driver_that_hangs_is_none(tmp_path):
    env = make_proof(tmp_path, 'trap "" TERM; for i in {1..300}; do sleep 0.1; done; echo "GPU 0"', 'true')
    script = tmp_path / 'tests/gpu/run.sh'
    text = script.read_text()
    assert 'timeout --kill-after 5 60 nvidia-smi' in text
    script.write_text(text.replace('timeout --kill-after 5 60 nvidia-smi', 'timeout --kill-after 1 1 nvidia-smi'))
    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu'], env=env)
    assert done.returncode == 2 and 'nvidia-smi finds none' in done.stderr and not (tmp_path / 'said').exists()


def test_tests_on_gpus_are_collected_everywhere_and_run_nowhere_else():
    seen = run([sys.executable, '-m', 'pytest', 'tests/gpu', '-v', '-m', 'not slow and not cluster and not browser'],
               cwd=ROOT, env=clean(MLPERF_RN50_NEED_ALL='1'))
    assert seen.returncode == 0, seen.stdout
    for path in (ROOT / 'tests/gpu').glob('test_*.py'):
        assert f'tests/gpu/{path.name}::' in seen.stdout
    assert 'tests that need a GPU: launch/test.sh --gpu' in seen.stdout
    assert ' skipped in ' in seen.stdout and ' passed' not in seen.stdout and 'error' not in seen.stdout


def test_what_is_expected_is_what_was_published():
    done = run([sys.executable, ROOT / 'docs/make_gpu_expectations.py', '--check'], env=clean(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    [dgx1] = [s for s in EXPECTATIONS['systems'] if (s['round'], s['system']) == ('v0.5', 'dgx1_ngc18.11_mxnet')]
    # By hand: 63 epochs of 1,281,167 images in 8,107.915 s on 8 GPUs, the slowest of its runs.
    assert dgx1['end_to_end'][0] == pytest.approx(63 * 1_281_167 / 8_107.915 / 8, abs=0.1)
    assert EXPECTATIONS['kinds']['V100']['bench_train'] == [1144, 1815]
