"""Images/s and parts of the time from the epochs and blocks of logs that differ from the rules."""

import pytest
from lines import mllog, run_lines, write_lines
from pytest import approx

from mlperf_rn50.analysis.sets.load import load_run_sets

IMAGES = 1_281_167
HEAD, ACCURACIES = run_lines(accuracies=(), status=None), (0.3, 0.5, 0.76)


def load(path, lines):
    (system,) = load_run_sets([write_lines(path / 'result_0.txt', lines)])
    return system


def progress(*, stop_s, block_s, epochs=4, train_s=10.0):
    """Return lines of blocks of four epochs whose stops come every stop_s, and the end of the
    run."""
    lines = []
    for block, accuracy in enumerate(ACCURACIES):
        start_s, first = block * block_s, block * epochs + 1
        for k in range(epochs):
            lines += [
                mllog('epoch_start', start_s + k * stop_s, epoch_num=first + k),
                mllog('epoch_stop', start_s + (k + 1) * stop_s, epoch_num=first + k),
            ]
        lines += [
            mllog('eval_start', start_s + train_s, epoch_num=first + epochs - 1),
            mllog('eval_accuracy', start_s + block_s, accuracy, epoch_num=first + epochs - 1),
        ]
    return [*HEAD, *lines, mllog('run_stop', len(ACCURACIES) * block_s, status='success')]


def test_training_lasts_to_the_evaluation_if_epochs_stop_when_their_steps_are_queued(tmp_path):
    system = load(tmp_path, progress(stop_s=0.5, block_s=12.0))
    # The first of 12 epochs is left out: 29.5 s for 11 epochs.
    assert system.images_per_s == approx(IMAGES * 11 / 29.5)
    assert (system.parts.first_s, system.parts.evaluation_s, system.parts.other_s) == approx(
        (0.5, 6.0, 0.0)
    )


def test_short_pause_before_an_evaluation_is_no_training(tmp_path):
    system = load(tmp_path, progress(stop_s=2.45, block_s=12.0))  # 0.2 s in 10 s
    assert (system.images_per_s, system.parts.other_s) == approx((IMAGES / 2.45, 0.6))


@pytest.mark.parametrize('train_s, is_known', [(10.7, True), (11.0, False)])
def test_speed_is_empty_if_unlogged_epochs_take_another_time(tmp_path, train_s, is_known):
    """Only the first four epochs of 2.5 s are logged; each further block trains train_s."""
    lines = list(HEAD)
    for k in range(4):
        lines += [
            mllog('epoch_start', 2.5 * k, epoch_num=k + 1),
            mllog('epoch_stop', 2.5 * k + 2.5, epoch_num=k + 1),
        ]
    end_s = 10.0
    for epoch, accuracy in zip((4, 8, 12), ACCURACIES):
        lines += [
            mllog('eval_start', end_s, epoch_num=epoch),
            mllog('eval_accuracy', end_s + 2, accuracy, epoch_num=epoch),
        ]
        end_s += 2 + train_s
    system = load(tmp_path, [*lines, mllog('run_stop', end_s - train_s, status='success')])
    assert (system.images_per_s is not None) == is_known
    assert bool(system.speed_doubt) == (not is_known)


def test_evaluation_beside_training_is_no_part_of_the_time(tmp_path):
    start, early = (mllog('eval_start', time_s, epoch_num=1) for time_s in (10, 0.5))
    parts = load(tmp_path, [early if line == start else line for line in run_lines()]).parts
    assert (parts.training_s, parts.evaluation_s, parts.other_s) == approx((10, 2, 0))
