"""Causes of a missed accuracy from configuration, log and metrics, on made-up courses of runs."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml
from helpers import table, write_metrics
from msgspec import structs
from sample_log import write_run

from mlperf_rn50.analysis import run_data
from mlperf_rn50.analysis.recipe.differences import find_deviations
from mlperf_rn50.analysis.run_data import RunData, load_run
from mlperf_rn50.analysis.why.accuracy import (
    Cause,
    explain_accuracy,
    judge_course,
    judge_recipe,
    weigh,
)
from mlperf_rn50.config import Config, render_yaml, to_tree
from mlperf_rn50.config_file import override
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.mllog.logged_run import Evaluation, Run
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import (
    CourseRecord,
    EndRecord,
    LossScaleRecord,
    ResumedRecord,
    TrainRecord,
)
from mlperf_rn50.train.options import OptimizerConfig, ScheduleConfig, TrainConfig

DIGITS = Config(
    data=DataConfig(dataset='digits', num_train=1437, num_val=360, num_classes=10),
    schedule=ScheduleConfig(base_lr=0.02, warmup_epochs=1, decay_epochs=12),
    train=TrainConfig(global_batch_size=64, max_epochs=12),
)
FALL = [2.3 * 0.96**k for k in range(60)]


def changed(text):
    """Return the configuration with changed values, such as train.max_epochs=2."""
    pairs = (word.split('=') for word in text.split())
    values = {key: yaml.safe_load(value) for key, value in pairs}
    return msgspec.convert(override(to_tree(DIGITS), values), Config)


def rate(s, epoch):
    progress = min(1, (epoch - s.warmup_epochs) / (s.decay_epochs - s.warmup_epochs))
    return s.base_lr * (epoch / s.warmup_epochs if epoch < s.warmup_epochs else (1 - progress) ** 2)


def course(config=DIGITS, losses=FALL, halved=0, num_reported=60):
    """Return a run that reported each of these losses, evenly over its epochs."""
    epochs = [(k + 1) * config.train.max_epochs / len(losses) for k in range(len(losses))]
    steps = [
        TrainRecord(k, e, 1.0, loss, rate(config.schedule, e))
        for k, (e, loss) in enumerate(zip(epochs, losses))
    ]
    folder = RunFolder(Path('none'), 0)
    log = Run(
        folder.result,
        'v0.7+',
        'aborted',
        target_accuracy=0.749,
        global_batch_size=64,
        num_ranks=1,
        evaluations=[Evaluation(2, 0.6, 1, None, None, None)],
    )
    records = [*steps[:num_reported], *[LossScaleRecord(1, 2.0, 1.0)] * halved]
    return RunData(folder, log, records, config)


def test_rate_of_a_partly_filled_last_step_is_that_of_the_schedule():
    """The last step applies a small part of the rate of a schedule that is cut after 12 epochs."""
    run = course(changed('schedule.decay_epochs=40'))
    last = run.records[-1]
    rates = {'learning_rate': last.learning_rate / 10}
    rates['scheduled_learning_rate'] = last.learning_rate
    run = replace(run, records=[*run.records[:-1], msgspec.structs.replace(last, **rates)])
    assert 'epochs' in {c['cause'] for c in explain_accuracy(run).data['causes']}


def test_run_that_failed_after_it_reached_its_target_missed_nothing():
    run = course(losses=[2.3] * 60)
    log = replace(run.log, status='failed', target_accuracy=0.6)
    assert explain_accuracy(replace(run, log=log)) is None
    assert explain_accuracy(replace(run, log=replace(log, target_accuracy=0.61)))


@pytest.mark.parametrize('status, names', [('aborted', {'epochs'}), ('failed', set())])
def test_run_ended_by_a_fault_is_not_blamed_on_its_planned_epochs(status, names):
    run = course(num_reported=20)
    run = replace(run, log=replace(run.log, status=status))
    causes = judge_course(run, run.config, 64, 1)
    assert {c.name for c in causes if c.strength > 1} == names


def test_run_that_was_ended_because_it_was_behind_is_not_blamed_on_its_planned_epochs():
    run = course(changed('run.stop_when_behind=true'), num_reported=20)
    run = replace(run, records=[*run.records, CourseRecord(4, behind=True)])
    causes = judge_course(run, run.config, 64, 1)
    assert not [c for c in causes if c.strength > 1]


def test_batch_without_similar_published_batches_is_no_cause():
    """No published set has 16 images per step."""
    config = replace(
        Config(), train=TrainConfig(global_batch_size=16), optimizer=OptimizerConfig('sgd')
    )
    assert find_deviations(config, 1) and not [*judge_recipe(config, 1, [])]


def accused(config=DIGITS, batch=64, num_ranks=1, **keys):
    causes = judge_course(course(config, **keys), config, batch, num_ranks)
    return {c.name for c in causes if c.strength > 1}


@pytest.mark.parametrize(
    'text, causes',
    table("""
 |
schedule.base_lr=0.01 |
schedule.base_lr=0.6 | learning_rate
schedule.base_lr=0.00066 | learning_rate
optimizer.momentum=0.0 | learning_rate
optimizer.name=lars schedule.base_lr=10.0 |
schedule.warmup_epochs=7 | warmup
schedule.decay_epochs=4 | decay
train.max_epochs=2 schedule.decay_epochs=2 | epochs
schedule.decay_epochs=90 schedule.warmup_epochs=20 train.max_epochs=5 | epochs
optimizer.weight_decay=0.1 | weight_decay
data.resize_shorter=300 | crop
data.crop=random_resized data.min_area=0.02 data.max_area=0.06 | crop_area
model.bn_momentum=0.999 | batch_norm
train.ema=0.9999 | averaging
train.label_smoothing=0.5 | label_smoothing
"""),
)
def test_mistake_in_the_configuration(text, causes):
    """A learning rate of 0.01 is half of the lowest shipped one; a run that ends in its warm-up is
    not judged by its learning rate."""
    assert accused(changed(text)) == {*causes.split()}


def test_run_that_ends_before_its_schedule_is_named_in_plain_words():
    config = changed('schedule.decay_epochs=40')
    assert accused(config) == {'epochs'}
    sentence = explain_accuracy(course(config)).data['sentence']
    assert sentence.endswith(': it trained 12 of the 40 epochs of its schedule.')


@pytest.mark.parametrize(
    'text, step',
    table("""
data.resize_shorter=300 | change data.resize_shorter
data.crop=random_resized data.min_area=0.02 data.max_area=0.06 | change data.max_area
schedule.decay_epochs=40 | change train.max_epochs
train.max_epochs=2 schedule.decay_epochs=2 | change schedule.decay_epochs and train.max_epochs
train.max_epochs=2 schedule.decay_epochs=2 schedule.decay=step schedule.step_epochs=[1] | change \
schedule.step_epochs and train.max_epochs
data.num_train=200 data.num_val=50 train.max_epochs=20 schedule.decay_epochs=20 | change \
train.global_batch_size
data.num_train=200 data.num_val=50 train.max_epochs=20 schedule.decay_epochs=20 \
train.global_batch_size=null train.local_batch_size=64 | change train.local_batch_size
"""),
)
def test_next_step_is_a_key_that_removes_the_cause(text, step):
    found = explain_accuracy(course(changed(text))).data
    assert step in found['next_step'].split(', or '), found


def test_training_that_a_resume_discarded_is_not_judged():
    run = course(losses=[9.0] * 60, halved=20)
    wrong = [structs.replace(r, learning_rate=0.6) for r in run.all(TrainRecord)]
    skipped = run.all(LossScaleRecord)
    behind = CourseRecord(12, behind=True)
    resumed = ResumedRecord(0, epoch=0.0)
    records = [*wrong, *skipped, behind, resumed, *course().records]
    found = judge_course(replace(run, records=records).preserved(), DIGITS, 64, 1)
    assert not [c for c in found if c.strength > 1]
    assert replace(run, records=records).preserved().last(CourseRecord) is None


def test_batch_with_few_steps_or_few_images_per_rank():
    for batch, num_ranks in ((700, 1), (64, 16)):
        config = changed(f'schedule.base_lr={batch / 3200}')
        assert 'batch' in accused(config, batch, num_ranks)


def test_skipped_steps():
    assert (accused(halved=12), accused(halved=20)) == (set(), {'loss_scale'})


def test_loss_above_that_of_equal_logits():
    losses = [2.3] * 20 + [9.0] * 20 + [1.0] * 20
    assert {'learning_rate', 'gradient_scale'} <= accused(losses=losses)
    text = explain_accuracy(course(losses=losses)).data['sentence']
    assert 'learning rate or gradient scale (largest loss' in text
    assert text.count('largest loss') == 1


def test_padding_of_the_last_step():
    for num_train, measured, is_accused in ((1700, '20.47 %', False), (1500, '36.53 %', True)):
        config = changed(f'data.num_train={num_train}')
        causes = judge_course(course(config), config, 1024, 1)
        (cause,) = (c for c in causes if 'padding' in c.figure)
        assert (cause.measured, cause.strength > 1) == (measured, is_accused)


def test_run_that_ended_before_its_last_step():
    causes = judge_course(course(num_reported=40), DIGITS, 64, 1)
    assert [(c.name, c.measured) for c in causes if c.strength > 1] == [('epochs', '66.67 %')]
    run = course(num_reported=56)  # its last steps are not recorded
    run = replace(run, log=replace(run.log, last_epoch=12))
    causes = list(judge_course(run, DIGITS, 64, 1))
    assert [c.name for c in causes if c.strength > 1] == []
    assert 'last learning rate relative to the largest' in [c.figure for c in causes]


def test_steps_of_a_long_run_are_thinned_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(run_data, '_MAX_RECORDS', 100)
    steps = [{'event': 'train', 'step': k, 'epoch': k / 10} for k in range(1, 1001)]
    end = {'event': 'end', 'status': 'failed'}
    write_metrics(RunFolder(tmp_path, 0), *steps, end)
    run = load_run(RunFolder(tmp_path, 0))
    found = [r.step for r in run.all(TrainRecord)]
    assert found == list(range(found[0], 1001, found[0])) and 50 <= len(found) <= 100
    assert run.last(EndRecord).status == 'failed'


def test_ratio_to_a_violated_limit_is_the_strength():
    found = [weigh('batch', 'steps', value, least=100, most=400) for value in (50, 200, 800)]
    assert [c.strength for c in found] == [2, 0.5, 2]
    assert found[0].expected == 'at least 100 and at most 400'


@pytest.fixture
def made(tmp_path):
    """Function that writes a run and reads it."""

    def make(config=DIGITS, accuracies=(0.3, 0.4), end='aborted'):
        write_run(tmp_path / 'result_0.txt', config, accuracies, end)
        (tmp_path / 'config.yaml').write_text(render_yaml(config))
        return load_run(RunFolder(tmp_path, 0))

    return make


def names(answer):
    return [c['cause'] for c in answer.data['causes']]


def test_converged_run_is_explained_only_by_a_probe_that_finds_a_leak(made):
    run = made(changed('schedule.base_lr=3.0'), (0.3, 0.8), 'converged')
    assert explain_accuracy(run) is None
    causes = [Cause('frozen', 5.0, 'arrays', '9', '1'), Cause('leak', 3.0, 'copies', '9', '1')]
    assert names(explain_accuracy(run, causes)) == ['leak']
    assert names(explain_accuracy(run, causes[:1])) == []


@pytest.mark.parametrize(
    'cause, step',
    table("""
leak | pack corrected images with mlperf-rn50 prepare
shuffle | change data.shuffle
frozen | look for changes of the program with git diff
 | mlperf-rn50 why {} --probe
"""),
)
def test_next_step_has_an_option_or_a_command(made, cause, step):
    run = made()
    found = explain_accuracy(run, [Cause(cause, 5.0, '', '', '')] if cause else None)
    assert found.data['next_step'] == step.format(run.folder.result)
    assert names(found) == ([cause] if cause else [])


def test_figures_that_are_too_early_or_explained_are_not_causes(made):
    causes = [
        Cause('frozen', 0.0, 'arrays', '9', '1', 'too early'),
        Cause('overfitting', 0.0, 'Top-1', '9', '1', 'possible'),
    ]
    found = explain_accuracy(made(), causes, 'Probed: weights of epoch 2.').data
    assert found['causes'] == []
    assert 'too early' in found['sentence'] and 'Probed: weights of epoch 2.' in found['notes']
    assert [row['verdict'] for row in found['evidence'][:2]] == ['too early', 'possible']
    assert 'too early' not in explain_accuracy(made(), causes[1:]).data['sentence']


def test_stopped_run_is_not_cleared_by_a_probe(made):
    run = made(end='interrupted')
    assert explain_accuracy(run) is None
    found = explain_accuracy(run, [Cause('labels_swapped', 8.0, 'classes', '3 for 4', 'none')])
    assert names(found) == ['labels_swapped']


@pytest.fixture
def compared(made, tmp_path):
    """Function that explains a run that has a reference run with the usual configuration."""
    folder = tmp_path / 'reference'
    folder.mkdir()
    write_run(folder / 'result_0.txt', DIGITS, (0.3, 0.7))
    (folder / 'config.yaml').write_text(render_yaml(DIGITS))

    def explain(accuracies, text):
        config = changed(f'run.reference=["{folder}"] {text}')
        return explain_accuracy(made(config, accuracies)).data

    return explain


@pytest.mark.parametrize(
    'text, expected',
    table("""
data.min_area=0.9 | augmentation (data.min_area: 0.9, expected 0.05
optimizer.momentum=0.98 | learning rate (optimizer.momentum: 0.98, expected 0.9
train.label_smoothing=0.05 | label smoothing (train.label_smoothing: 0.05, expected 0
train.max_epochs=null train.global_batch_size=null train.local_batch_size=64 |
train.loss_scale=2048 schedule.step_epochs=[3,6] |
"""),
)
def test_configuration_is_compared_with_the_reference_runs(compared, text, expected):
    near = ' within a factor of 1.25, as in reference runs)'
    texts = [c['text'] for c in compared((0.3, 0.4), text)['causes']]
    assert texts == ([expected + near] if expected else [])


def test_reference_is_the_first_converged_run_of_its_folder(compared, tmp_path):
    bad, folder = changed('schedule.base_lr=0.6'), tmp_path / 'reference'
    write_run(folder / 'result_0.txt', bad, (0.1, 0.3), 'aborted')
    (folder / 'config.yaml').write_text(render_yaml(bad))
    write_run(folder / 'result_1.txt', DIGITS, (0.3, 0.8))
    RunFolder(folder, 1).config.write_text(render_yaml(DIGITS))
    [cause] = compared((0.3, 0.4), 'train.label_smoothing=0.05')['causes']
    assert 'train.label_smoothing: 0.05, expected 0' in cause['text']


def test_run_that_is_not_below_its_reference_runs_differs_rightly(compared):
    for top1 in (0.72, 0.7, 0.68):  # above, equal, below by chance
        found = compared((0.3, top1), 'train.label_smoothing=0.05 data.min_area=0.9')
        assert found['causes'] == []
        assert 'Not below its reference runs' in ' '.join(found['notes'])


def test_damaged_configuration_has_no_answer(made):
    run = made()
    run.folder.config.write_text('train: [1, 2')
    assert explain_accuracy(load_run(run.folder)) is None
