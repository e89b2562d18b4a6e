"""The comparison of training steps with PyTorch, with stand-ins for both programs."""

import json

import pytest
from helpers import ROOT

ROW = {'images_per_s': 300.0, 'share_of_peak': 0.15}


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')
    import compare

    return compare


def test_ratio_to_the_fastest_other_program_and_shares_of_the_peak(compare, capsys):
    own = iter([{**ROW, 'images_per_s': rate, 'share_of_peak': rate / 2000} for rate in (300, 280)])
    slow, fast = iter([{'images_per_s': 100.0}] * 2), iter([{'images_per_s': 400.0}] * 2)
    sides = {'mlperf-rn50': own, 'torch eager': slow, 'torch compiled': fast}
    compare.compare('batch 8', {name: it.__next__ for name, it in sides.items()}, 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition('  ')[2] for line in lines[:3]] == [
        '14.5% of peak',
        '5.0% of peak',
        '20.0% of peak',
    ]
    assert lines[-1] == 'training step, batch 8, images/s: ratio 0.725'


def test_side_that_fails_is_left_out(compare, capsys):
    def fail():
        raise SystemExit('no Python.h')

    sides = {'mlperf-rn50': lambda: ROW, 'torch eager': lambda: {'images_per_s': 100.0}}
    compare.compare('batch 8', {**sides, 'torch compiled': fail}, 2)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith('ratio 3.000') and 'no Python.h' in err
    with pytest.raises(SystemExit, match=r'no Python\.h'):
        compare.compare('batch 8', {'mlperf-rn50': lambda: ROW, 'torch compiled': fail}, 2)


@pytest.mark.parametrize(
    'words, batches, precision, num_sides',
    [
        ('--device gpu', [64, 208, 408], 'float16', 2),
        ('--device gpu --batch-sizes 8 --precision float32', [8], 'float32', 2),
        ('--batch-sizes 2 4', [2, 4], 'float32', 4),
    ],
)
def test_both_programs_get_the_same_case(
    compare, monkeypatch, words, batches, precision, num_sides
):
    calls = []

    def stand_in(command, **variables):
        calls.append([str(word) for word in command])
        return ROW if 'torch_peer' in calls[-1][1] else {'tables': [{'rows': [ROW]}]}

    monkeypatch.setattr(compare, 'run_json', stand_in)
    argv = ['compare.py', 'step', '--torch-python', '/its/python', '--rounds', '1', *words.split()]
    monkeypatch.setattr('sys.argv', argv)
    compare.main()
    own = [c for c in calls if 'bench' in c]
    others = [json.loads(c[2]) for c in calls if c[0] == '/its/python']
    assert [c[c.index('--batch-sizes') + 1] for c in own] == [*map(str, batches)]
    assert [o['batch_size'] for o in others] == [b for b in batches for _ in range(num_sides)]
    assert {c[c.index('--precisions') + 1] for c in own} == {o['precision'] for o in others}
    assert {o['precision'] for o in others} == {precision}
    is_gpu = {o['device'] == 'gpu' for o in others}
    assert is_gpu == {'tests/gpu/resnet50.yaml' in c for c in own} == {'gpu' in words}
