"""Numbers of a log that its other lines do not bear out are never believed without a word."""
import pytest
from lines import mllog, run_lines, write_lines

from mlperf_rn50.mlperf.reader import read_run

ACCURACIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.76)


def read(tmp_path, lines):
    return read_run(write_lines(tmp_path / 'result_0.txt', lines))


def contradictions(run):
    return [w.text for w in run.warnings if w.is_contradiction]


def honest(**keys):
    return run_lines(ACCURACIES, epoch_s=100.0, eval_s=3.0, **keys)


def at_other_time(lines, shift_s, *keys):
    """The last line of some keys, moved."""
    for key in keys:
        place = max(i for i, line in enumerate(lines) if f'"key": "{key}"' in line)
        stamp = lines[place].partition('"time_ms": ')[2].partition(',')[0]
        lines[place] = lines[place].replace(stamp, str(int(stamp) + round(1e3 * shift_s)))
    return lines


def test_an_honest_log_is_contradicted_by_nothing(tmp_path):
    run = read(tmp_path, honest())
    assert (run.status, run.time_to_train_s, contradictions(run)) == ('converged', pytest.approx(824), [])


def test_an_end_in_the_middle_of_an_epoch_is_none(tmp_path):
    run = read(tmp_path, at_other_time(honest(), -90, 'eval_start', 'eval_accuracy', 'eval_stop', 'run_stop'))
    assert (run.status, run.time_to_train_s) == ('failed', None)
    assert 'before the end of epoch 8' in contradictions(run)[0]


def test_an_end_in_the_middle_of_a_block_is_none(tmp_path):
    lines = [line for line in honest() if '"epoch_st' not in line]
    lines = [line for line in lines if '"eval_' not in line or '"epoch_num": 8' in line]
    lines[-4:-4] = [mllog('block_start', 0, first_epoch_num=1, epoch_count=8),
                    mllog('block_stop', 821, first_epoch_num=1)]
    assert read(tmp_path, lines).status == 'converged'
    run = read(tmp_path, at_other_time(lines, -300, 'eval_start', 'eval_accuracy', 'eval_stop', 'run_stop'))
    assert (run.status, run.time_to_train_s) == ('failed', None)
    assert 'before the end of a block' in contradictions(run)[0]


@pytest.mark.parametrize('named', [80, 2])
def test_an_evaluation_of_an_epoch_that_was_not_trained_is_said(tmp_path, named):
    lines = [line.replace('"epoch_num": 8', f'"epoch_num": {named}') if '"eval_' in line else line
             for line in honest() if '"eval_' not in line or '"epoch_num": 8' in line]
    assert f'the last evaluation is of epoch {named}, the last epoch that was trained is 8' in contradictions(
        read(tmp_path, lines))


def test_a_target_that_is_too_low_for_the_closed_division_is_said(tmp_path):
    assert any('the target is 0.5, the closed division' in text
               for text in contradictions(read(tmp_path, honest(target=0.5))))
    assert contradictions(read(tmp_path, run_lines(ACCURACIES[:5], target=0.5, division='open'))) == []


def test_a_small_set_that_calls_itself_imagenet_is_none(tmp_path):
    lines = [*honest(train_samples=1000)[:-1], mllog('dataset', 0, 'imagenet', is_imagenet=True), honest()[-1]]
    run = read(tmp_path, lines)
    assert not run.is_imagenet and '1000 training images, ImageNet has 1281167' in contradictions(run)[0]


def test_a_second_end_at_the_same_moment_is_no_copy_of_the_first(tmp_path):
    run = read(tmp_path, [*honest(), mllog('run_stop', 824, status='aborted')])
    assert run.status == 'failed'
    assert not any('equal to an earlier line' in w.text for w in run.warnings)
