"""What a set is believed: near copies, copied systems, mixed sets and missing runs are said, honest sets are not."""
import itertools
import random
import re

import pytest
from helpers import ROOT
from lines import mllog, run_lines, write_lines, write_set
from made_systems import studies_of, study_of

from mlperf_rn50.mlperf.copies import find_copies
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import MAX_OF_SPLITS, compare_splits, make_studies
from mlperf_rn50.study.systems import load_systems

TIME = re.compile(r'("time_ms": )(\d+)')
START_MS = 1_600_000_000_000


def honest(folder, num_runs=5, number=0, **keys):
    """Runs of eight epochs whose lengths and accuracies vary as those of real ones."""
    rng = random.Random(number)
    write_set(folder, num_runs, epoch_s=20.0, eval_s=1.0, **{
        'accuracies': lambda k: (*sorted(rng.randint(5000, 35000) / 50000 for _ in range(7)), 0.76), **keys})
    for path in folder.glob('result_*.txt'):
        late = list(itertools.accumulate(rng.randint(0, 50) for _ in range(200)))  # of each whole second
        path.write_text(with_times(lambda t, late=late: t + late[t // 1000])(path.read_text()))
    return folder


def runs_of(folder):
    return [read_run(p) for p in sorted(folder.glob('result_*.txt'))]


def with_times(change):
    """What changes the milliseconds since run_start of every line after it."""
    def one(match):
        time = int(match[2]) - START_MS
        return f'{match[1]}{START_MS + (change(time) if time > 0 else time)}'
    return lambda text: TIME.sub(one, text)


def test_honest_runs_and_round_times_are_no_copies(tmp_path):
    found = [r for number in range(5) for r in runs_of(honest(tmp_path / str(number), number=number))]
    assert find_copies(found) == []
    write_set(tmp_path / 'round', accuracies=[0.1] * 20 + [0.76], epoch_s=10.0)
    even = write_set(tmp_path / 'even', accuracies=[0.1] * 20 + [0.76], epoch_s=lambda k: 10.1237 + k / 5000,
                     eval_s=1.01)
    for same in (runs_of(tmp_path / 'round'), runs_of(even)):
        assert len(same) == 5 and find_copies(same) == []


@pytest.mark.parametrize('folder', ['logs', pytest.param('../shared/published', marks=pytest.mark.needs_published)])
def test_no_real_log_is_suspected(folder):
    runs = [r for s in load_systems([ROOT / folder]) for r in s.runs]
    assert len(runs) > 10 and find_copies(runs) == []


def test_a_system_that_is_a_copy_of_another_is_said(tmp_path):
    honest(tmp_path / 's/a', number=1)
    honest(tmp_path / 's/c', number=2)
    for path in (tmp_path / 's/a').iterdir():
        write_lines(tmp_path / 's/b' / path.name, [path.read_text().replace('"seed", "value": ', '"seed", "value": 9')])
    study = study_of(tmp_path)
    said = 'all 5 logs have the times of logs of a: they are copies, not runs of another system'
    assert {s.name: s.doubts for s in study.systems} == {'a': (), 'b': (said,), 'c': ()}
    assert f'- b: {said}' in render_table([study])
    assert {s.name for s, c in zip(study.systems, study.comparisons) if c} == {'a', 'c'}  # a ratio would say nothing
    assert {s.name for s, r in zip(study.systems, study.rates) if r} == {'a', 'c'}


def test_one_log_of_another_system_is_named(tmp_path):
    honest(tmp_path / 's/a', number=1)
    honest(tmp_path / 'other/a', number=2)
    (tmp_path / 'other/a/result_3.txt').write_text((tmp_path / 's/a/result_1.txt').read_text())
    first, second = load_systems([tmp_path])
    copied = next(s for s in (first, second) if s.doubts)
    assert [len(s.doubts) for s in (first, second)] == [0, 1]
    assert copied.doubts == (f'result_1.txt has the times of result_3.txt of {first.folder}: one is a copy of the '
                             'other',)


def test_a_set_without_seeds_is_said(tmp_path):
    write_set(tmp_path, 2, epoch_s=lambda k: 10.123 + k)
    said = 'no log names a seed: nothing says that the runs differ in theirs'
    for k in range(2):
        assert said not in load_systems([tmp_path])[0].warnings
        path = tmp_path / f'result_{k}.txt'
        path.write_text(''.join(x for x in path.read_text().splitlines(True) if '"key": "seed"' not in x))
    assert said in load_systems([tmp_path])[0].warnings


@pytest.mark.parametrize('numbers, said', [
    ((0, 1, 2, 3, 7), 'result_4, 5, 6 are missing: what became of those runs?'),
    ((0, 1, 2, 3, 5), 'result_4 is missing: what became of that run?'),
    ((1, 2, 3, 4, 5), None), ((2, 3, 4, 5, 6), 'result_1 is missing: what became of that run?'), ((7,), None),
    ((0, 999_999_999), 'result_1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 999999988 more are missing: what became of those '
                       'runs?')])
def test_holes_in_the_numbers_are_said(tmp_path, numbers, said):
    for k, number in enumerate(numbers):
        write_lines(tmp_path / f'result_{number}.txt', run_lines(seed=k, epoch_s=10.123 + k))
    assert [w for w in load_systems([tmp_path])[0].warnings if 'missing' in w] == ([said] if said else [])


def test_a_run_whose_clock_contradicts_itself_did_converge(tmp_path):
    path = write_set(tmp_path, epoch_s=lambda k: 100.123 + k) / 'result_4.txt'
    path.write_text(path.read_text().replace(mllog('run_start', 0), mllog('run_start', 60)))
    found = load_systems([tmp_path])[0]
    assert found.runs[4].status == 'failed'
    assert '1 of 5 runs does not count: the log contradicts itself' in found.warnings


def test_a_refusal_is_said_once_and_the_singular_is_right(tmp_path):
    write_set(tmp_path / 's/a', 1, nodes=1, ranks=8)
    write_set(tmp_path / 's/b', 1, nodes=2, ranks=8)
    write_set(tmp_path / 's/c', 2, epoch_s=lambda k: 10.123 + k, batch=lambda k: 64 if k else 32)
    text = render_table(studies_of(tmp_path))
    assert text.count('runs that differ in it are no set') == 1
    assert 'here is 1;' in text and 'here are 1' not in text


@pytest.mark.parametrize('names, is_alike, is_one', [
    (('unnamed', 'unnamed'), False, False), (('box', 'box'), True, True), (('1xbox', '2xbox'), True, False),
    (('2xDGX-1', '12xDGX-2H'), False, False)])
def test_an_efficiency_between_unknown_accelerators_says_what_it_supposes(tmp_path, names, is_alike, is_one):
    for nodes, name in zip((1, 2), names):
        folder = write_set(tmp_path / f's/{nodes}n', 1, nodes=nodes, ranks=4 * nodes)
        path = folder / 'result_0.txt'
        path.write_text(path.read_text().replace(f'{nodes}xbox', name) + mllog('number_of_nodes', 0, nodes) + '\n')
    study = study_of(tmp_path)
    assert [s.num_nodes for s in study.systems] == [1, 2] and study.comparisons[1].efficiency
    said = 'the accelerator of 1n, 2n is not known: an efficiency supposes that all are alike'
    assert study.cautions == (() if is_alike else (said,))
    assert [n for n in study.notes if n.startswith('all ran on')] == (['all ran on: box'] if is_one else [])


def sizes(home, counts):
    """Systems of 16 accelerators on so many nodes."""
    for i, nodes in enumerate(counts):
        write_set(home / f's/{i:02d}', 1, nodes=nodes, ranks=16, epoch_s=10.0 + (i * 7) % 11)
    return load_systems([home])


def test_of_many_splits_only_the_widest_is_shown_and_said(tmp_path):
    few = compare_splits(sizes(tmp_path / 'few', [1, 2] * (MAX_OF_SPLITS // 2)))
    assert len(few) == (MAX_OF_SPLITS // 2) ** 2
    systems = sizes(tmp_path / 'many', [1, 2] * MAX_OF_SPLITS)
    [widest] = compare_splits(systems)
    pairs = [(a, b) for a, b in itertools.permutations(systems, 2) if a.num_nodes != b.num_nodes]
    fastest = max(s.images_per_s for s in systems)
    assert widest.difference == max(a.images_per_s / b.images_per_s - 1 for a, b in pairs if a.images_per_s == fastest)
    study, = make_studies(systems)
    assert ('of the 16 systems of 16 accelerators, only the fastest and the slowest on another number of nodes stand '
            'side by side') in study.notes
