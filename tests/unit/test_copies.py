"""Copies among runs: found whatever seed or date they name, and not where times are equal by chance."""
from lines import write_set

from mlperf_rn50.mlperf.copies import find_copies
from mlperf_rn50.mlperf.reader import read_run

REASON = 'all 10 times of epochs and evaluations are equal to the millisecond'


def copies(folder, **keys):
    """What is found among three runs of two epochs."""
    write_set(folder, 3, **{'epoch_s': lambda k: 10.123 + k, **keys})
    return find_copies([read_run(folder / f'result_{k}.txt') for k in range(3)])


def test_runs_of_their_own_are_no_copies(tmp_path):
    assert copies(tmp_path) == []


def test_a_copy_with_another_seed_is_found(tmp_path):
    [found] = copies(tmp_path, epoch_s=lambda k: 10.123 + k % 2)
    assert (found.run.path.name, found.original.path.name) == ('result_2.txt', 'result_0.txt')
    assert found.run.seed != found.original.seed
    assert found.text == f'result_2.txt is a copy of result_0.txt: {REASON}'


def test_every_copy_names_the_first_run(tmp_path):
    assert [c.original.path.name for c in copies(tmp_path, epoch_s=10.123)] == ['result_0.txt'] * 2


def test_a_copy_of_another_day_or_with_other_accuracies_is_found(tmp_path):
    [found] = copies(tmp_path, epoch_s=lambda k: 10.123 + k % 2, accuracies=lambda k: (0.5 + k / 100, 0.76))
    assert found.text == f'result_2.txt is a copy of result_0.txt: {REASON}, though not the accuracies'
    path = tmp_path / 'result_2.txt'
    path.write_text(path.read_text().replace('"time_ms": 16', '"time_ms": 15'))
    assert len(find_copies([read_run(tmp_path / f'result_{k}.txt') for k in (0, 2)])) == 1


def test_one_time_that_differs_by_a_millisecond_makes_another_run(tmp_path):
    assert copies(tmp_path, epoch_s=lambda k: 10.123 + k / 1000) == []


def test_times_of_whole_seconds_and_runs_of_milliseconds_prove_nothing(tmp_path):
    assert copies(tmp_path, epoch_s=10.0) == []
    assert copies(tmp_path, epoch_s=0.123, eval_s=0.001) == []


def test_a_run_without_times_is_no_copy(tmp_path):
    assert copies(tmp_path, epoch_s=10.123, accuracies=()) == []


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for name in 'ab':
        write_set(tmp_path / name, 1, epoch_s=10.123)
    [found] = find_copies([read_run(tmp_path / name / 'result_0.txt') for name in 'ab'])
    assert found.text.startswith(f'{tmp_path}/b/result_0.txt is a copy of {tmp_path}/a/result_0.txt: ')
