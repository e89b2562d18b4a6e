"""Causes of a missed accuracy from configuration, log and metrics, on made-up courses of runs."""

from dataclasses import replace

import pytest
from sample_log import write_run

from mlperf_rn50.analysis.why.accuracy import Cause, explain_accuracy, judge_course, weigh
from mlperf_rn50.analysis.why.load import WhyRun, load_run
from mlperf_rn50.config import Config, render_yaml
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.mllog.logged_run import Evaluation, Run
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import CourseRecord, LossScaleRecord, TrainRecord
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig

DIGITS = Config(
    data=DataConfig(dataset='digits', num_train=1437, num_val=360, num_classes=10),
    schedule=ScheduleConfig(base_lr=0.02, warmup_epochs=1, decay_epochs=12),
    train=TrainConfig(global_batch_size=64, max_epochs=12),
)
FALL = [2.3 * 0.96**k for k in range(60)]


def changed(**sections):
    return replace(
        DIGITS, **{name: replace(getattr(DIGITS, name), **keys) for name, keys in sections.items()}
    )


def rate(s, epoch):
    progress = min(1, (epoch - s.warmup_epochs) / (s.decay_epochs - s.warmup_epochs))
    return s.base_lr * (epoch / s.warmup_epochs if epoch < s.warmup_epochs else (1 - progress) ** 2)


def course(tmp_path, config=DIGITS, losses=FALL, curve=(0.2, 0.5, 0.6, 0.6), halved=0):
    """Return a run that reported each of these losses, evenly over its epochs."""
    epochs = [(k + 1) * config.train.max_epochs / len(losses) for k in range(len(losses))]
    steps = [
        TrainRecord(k, e, 1.0, loss, rate(config.schedule, e))
        for k, (e, loss) in enumerate(zip(epochs, losses))
    ]
    log = Run(
        tmp_path / 'result_0.txt',
        'v0.7+',
        'aborted',
        target_accuracy=0.749,
        global_batch_size=64,
        num_ranks=1,
        evaluations=[Evaluation(k + 1, a, 1, None, None, None) for k, a in enumerate(curve)],
    )
    return WhyRun(RunFolder(tmp_path, 0), log, [*steps, *[LossScaleRecord(1, 2.0, 1.0)] * halved])


def accused(tmp_path, config=DIGITS, batch=64, num_ranks=1, **keys):
    causes = judge_course(course(tmp_path, config, **keys), config, batch, num_ranks)
    return {c.name for c in causes if c.strength > 1}


def test_usual_course_accuses_nothing(tmp_path):
    assert accused(tmp_path) == set()


@pytest.mark.parametrize(
    'cause, sections',
    [
        ('learning_rate', {'schedule': {'base_lr': 0.6}}),
        ('learning_rate', {'schedule': {'base_lr': 0.02 / 30}}),
        ('learning_rate', {'optimizer': {'momentum': 0.0}}),
        ('warmup', {'schedule': {'warmup_epochs': 7}}),
        ('decay', {'schedule': {'decay_epochs': 4}}),
        ('epochs', {'train': {'max_epochs': 2}, 'schedule': {'decay_epochs': 2}}),
        ('weight_decay', {'optimizer': {'weight_decay': 0.1}}),
        ('crop', {'data': {'resize_shorter': 300}}),
        ('crop', {'data': {'crop': 'random_resized', 'min_area': 0.02, 'max_area': 0.06}}),
        ('batch_norm', {'model': {'bn_momentum': 0.999}}),
    ],
)
def test_mistake_in_the_configuration(tmp_path, cause, sections):
    assert accused(tmp_path, changed(**sections)) == {cause}


def test_run_that_ends_before_its_schedule_is_named_in_plain_words(tmp_path):
    assert accused(tmp_path, changed(schedule={'decay_epochs': 40})) == {'epochs'}
    config = changed(schedule={'decay_epochs': 40})
    found = explain_accuracy(replace(course(tmp_path, config), config=config))
    assert found.sentence.endswith(': it trained 12 of the 40 epochs of its schedule.')


@pytest.mark.parametrize('batch, num_ranks', [(700, 1), (64, 16)])
def test_batch_with_few_steps_or_few_images_per_rank(tmp_path, batch, num_ranks):
    assert 'batch' in accused(
        tmp_path, changed(schedule={'base_lr': batch / 3200}), batch, num_ranks
    )


def test_half_of_the_lowest_learning_rate_is_usual(tmp_path):
    assert accused(tmp_path, changed(schedule={'base_lr': 0.01})) == set()


def test_run_that_ends_in_its_warmup_is_not_judged_by_its_learning_rate(tmp_path):
    config = changed(schedule={'decay_epochs': 90, 'warmup_epochs': 20}, train={'max_epochs': 5})
    assert accused(tmp_path, config) == {'epochs'}


def test_lars_has_other_learning_rates(tmp_path):
    assert (
        accused(tmp_path, changed(optimizer={'name': 'lars'}, schedule={'base_lr': 10.0})) == set()
    )


def test_skipped_steps(tmp_path):
    assert accused(tmp_path, halved=12) == set()
    assert accused(tmp_path, halved=20) == {'loss_scale'}


def test_loss_above_that_of_equal_logits(tmp_path):
    losses = [2.3] * 20 + [9.0] * 20 + [1.0] * 20
    assert {'learning_rate', 'gradient_scale'} <= accused(tmp_path, losses=losses)
    text = explain_accuracy(replace(course(tmp_path, losses=losses), config=DIGITS)).sentence
    assert (
        'learning rate or gradient scale (largest loss' in text and text.count('largest loss') == 1
    )


@pytest.mark.parametrize('num_train, is_accused', [(1700, False), (1500, True)])
def test_padding_of_the_last_step(tmp_path, num_train, is_accused):
    config = changed(data={'num_train': num_train})
    (cause,) = (
        c for c in judge_course(course(tmp_path, config), config, 1024, 1) if 'padding' in c.figure
    )
    assert (
        cause.measured == ('36.53 %' if is_accused else '20.47 %')
        and (cause.strength > 1) == is_accused
    )


def test_run_that_ended_before_its_last_step(tmp_path):
    run = course(tmp_path)
    run = replace(run, records=run.records[:40])
    causes = judge_course(run, DIGITS, 64, 1)
    assert [(c.name, c.measured) for c in causes if c.strength > 1] == [('epochs', '66.67 %')]


def test_ratio_to_a_violated_limit_is_the_strength():
    found = [weigh('batch', 'steps', value, least=100, most=400) for value in (50, 200, 800)]
    assert [c.strength for c in found] == [2, 0.5, 2] and found[
        0
    ].expected == 'at least 100 and at most 400'


def answer(tmp_path, config, accuracies=(0.3, 0.4), end='aborted'):
    write_run(tmp_path / 'result_0.txt', config, accuracies, end)
    (tmp_path / 'config.yaml').write_text(render_yaml(config))
    return explain_accuracy(load_run(RunFolder(tmp_path, 0)))


def test_answer_names_at_most_two_causes_and_what_to_change(tmp_path):
    found = answer(
        tmp_path,
        changed(schedule={'base_lr': 30.0, 'warmup_epochs': 9}, model={'bn_momentum': 0.999}),
    )
    assert [c['cause'] for c in found.values['causes']] == ['learning_rate', 'batch_norm']
    assert found.sentence.startswith(
        'Top-1 40.00 %, target 74.90 %: learning rate (per 256 images at momentum 0.9: 120, '
        'expected at least 0.03 and '
        'at most 1.6) or batch norm ('
    )
    assert found.next_step == 'change schedule.base_lr, or change model.bn_momentum'
    row = dict(zip(found.head, found.evidence[0]))
    assert (row['cause'], row['measured'], row['verdict']) == ('learning_rate', '120', 'cause')
    assert {verdict for *_, verdict in found.evidence} == {'cause', 'possible', 'usual'}


def test_leak_is_the_only_probed_fault_of_a_converged_run(tmp_path):
    assert answer(tmp_path, DIGITS, (0.3, 0.8), 'converged') is None
    run, causes = (
        load_run(RunFolder(tmp_path, 0)),
        [Cause('frozen', 5.0, 'arrays', '9', '1'), Cause('leak', 3.0, 'copies', '9', '1')],
    )
    assert [c['cause'] for c in explain_accuracy(run, causes).values['causes']] == ['leak']
    assert explain_accuracy(run, causes[:1]).values['causes'] == []


@pytest.mark.parametrize(
    'cause, step',
    [
        ('leak', 'pack corrected images with mlperf-rn50 prepare'),
        ('shuffle', 'change data.shuffle'),
        ('frozen', 'look for changes of the program with git diff'),
    ],
)
def test_next_step_has_an_option_or_a_command(tmp_path, cause, step):
    assert answer(tmp_path, DIGITS).values['causes'] == []
    assert (
        explain_accuracy(
            load_run(RunFolder(tmp_path, 0)), [Cause(cause, 5.0, '', '', '')]
        ).next_step
        == step
    )


def test_figures_that_are_too_early_or_explained_are_not_causes(tmp_path):
    assert answer(tmp_path, DIGITS).values['causes'] == []
    run, found = (
        load_run(RunFolder(tmp_path, 0)),
        [
            Cause('frozen', 0.0, 'arrays', '9', '1', 'too early'),
            Cause('overfitting', 0.0, 'Top-1', '9', '1', 'possible'),
        ],
    )
    result = explain_accuracy(run, found, 'Probed: weights of epoch 2.')
    assert 'too early' in result.sentence and 'Probed: weights of epoch 2.' in result.notes
    assert [(row[0], row[-1]) for row in result.evidence[:2]] == [
        ('frozen', 'too early'),
        ('overfitting', 'possible'),
    ]
    assert 'too early' not in explain_accuracy(run, found[1:]).sentence


def test_stopped_run_is_not_cleared_by_a_probe(tmp_path):
    answer(tmp_path, DIGITS, end='interrupted')
    run = load_run(RunFolder(tmp_path, 0))
    assert explain_accuracy(run) is None
    found = explain_accuracy(run, [Cause('labels_swapped', 8.0, 'classes', '3 for 4', 'none')])
    assert [c['cause'] for c in found.values['causes']] == ['labels_swapped']


@pytest.mark.parametrize(
    'value, verdict', [(0.25, 'usual'), (0.250004, 'usual'), (0.2501, 'possible')]
)
def test_printed_limit_decides(value, verdict):
    found = weigh('batch_norm', 'part', value, most=0.25)
    assert (found.verdict, found.strength > 1) == (verdict, verdict == 'possible')


def test_converged_run_needs_no_explanation(tmp_path):
    assert answer(tmp_path, changed(schedule={'base_lr': 3.0}), (0.3, 0.8), 'converged') is None


def test_run_without_a_visible_cause_is_probed(tmp_path):
    assert answer(tmp_path, DIGITS).next_step == f'mlperf-rn50 why {tmp_path} --probe'


def test_running_run_is_explained_once_it_is_behind(tmp_path):
    write_run(tmp_path / 'result_0.txt', DIGITS, (0.3, 0.4), None)
    (tmp_path / 'config.yaml').write_text(render_yaml(changed(schedule={'base_lr': 3.0})))
    run = load_run(RunFolder(tmp_path, 0))
    assert explain_accuracy(run) is None
    record = CourseRecord(4, below=True, behind=True, text='behind by 9 points')
    found = explain_accuracy(replace(run, records=[record]))
    assert found.values['causes'][0]['cause'] == 'learning_rate' and found.notes == (
        'behind by 9 points',
    )


def compared(tmp_path, accuracies, reference=(0.3, 0.7), **sections):
    """Explain a run that has a reference run with the usual configuration."""
    folder = tmp_path / 'reference'
    folder.mkdir(exist_ok=True)
    write_run(folder / 'result_0.txt', DIGITS, reference)
    (folder / 'config.yaml').write_text(render_yaml(DIGITS))
    return answer(tmp_path, changed(run={'reference': (str(folder),)}, **sections), accuracies)


@pytest.mark.parametrize(
    'sections, expected',
    [
        (
            {'data': {'min_area': 0.9}},
            [
                'augmentation (data.min_area: 0.9, expected 0.05 within a factor of 1.25, as in '
                'reference runs)'
            ],
        ),
        (
            {'optimizer': {'momentum': 0.98}},
            [
                'learning rate (optimizer.momentum: 0.98, expected 0.9 within a factor of 1.25, '
                'as in reference runs)'
            ],
        ),
        ({'train': {'max_epochs': None, 'global_batch_size': None, 'local_batch_size': 64}}, []),
    ],
)
def test_configuration_is_compared_with_the_reference_runs(tmp_path, sections, expected):
    found = compared(tmp_path, (0.3, 0.4), **sections)
    assert [c['text'] for c in found.values['causes']] == expected


@pytest.mark.parametrize(
    'accuracies', [(0.3, 0.72), (0.3, 0.7), (0.3, 0.68)], ids=['above', 'equal', 'by chance']
)
def test_run_that_is_not_below_its_reference_runs_differs_rightly(tmp_path, accuracies):
    found = compared(tmp_path, accuracies, train={'label_smoothing': 0.05}, data={'min_area': 0.9})
    assert found.values['causes'] == [] and 'Not below its reference runs' in ' '.join(found.notes)


def test_value_of_some_reference_run_is_right(tmp_path):
    found = compared(tmp_path, (0.3, 0.4), train={'label_smoothing': 0.05})
    assert [c['cause'] for c in found.values['causes']] == ['label_smoothing']
    assert found.values['causes'][0]['text'].startswith(
        'label smoothing (train.label_smoothing: 0.05, expected 0 '
    )


def test_damaged_configuration_has_no_answer(tmp_path):
    write_run(tmp_path / 'result_0.txt', DIGITS, (0.3, 0.4), 'aborted')
    (tmp_path / 'config.yaml').write_text('train: [1, 2')
    assert explain_accuracy(load_run(RunFolder(tmp_path, 0))) is None
