"""Causes of a missed accuracy from predictions, labels, images and weights, on made-up figures."""

import re

import numpy as np
import pytest
from helpers import table, values

from mlperf_rn50.analysis.why import evidence
from mlperf_rn50.analysis.why.accuracy import Cause, weigh
from mlperf_rn50.analysis.why.labels import Images, judge_labels, judge_noise

NUM = 10
LABELS = np.arange(400) % NUM
CYCLE = np.array([0, 1, 2, 4, 5, 3, 6, 7, 8, 9])
SWAP = np.array([0, 1, 2, 8, 4, 5, 6, 7, 3, 9])
PERMUTED = np.array([8, 0, 7, 1, 3, 6, 2, 4, 5, 9])
SEEDS = range(20)


def accused(causes):
    return [c.name for c in causes if c.strength > 1]


def logits_of(taken):
    """Return logits that differ little but for the taken class of each image."""
    logits = 0.1 * np.random.default_rng(0).standard_normal((len(taken), NUM))
    logits[np.arange(len(taken)), taken] = 6.0
    return logits


def predictions(random, right, num=2000):
    """Return labels and logits: a share is right, most other images are taken for the next class;
    sure where right."""
    labels = random.integers(0, NUM, num)
    logits = random.standard_normal((num, NUM))
    is_right = random.random(num) < right
    logits[np.arange(num), labels] += np.where(is_right, 8, 4)
    logits[np.arange(num), (labels + 1) % NUM] += np.where(is_right, 4, 5.5)
    return labels, logits


def weak_logits(random, labels, right):
    """Return logits of a network that has learned little: the true class is often, but not always,
    the largest."""
    logits = random.standard_normal((len(labels), NUM))
    logits[np.arange(len(labels)), labels] += 2.8 * right
    logits[np.arange(len(labels)), labels ^ 1] += 1.4 * right  # a similar class
    return logits


def pictures(random, labels, spread=0.5):
    """Return images of 8x8 pixels that resemble those of their class."""
    kinds = np.random.default_rng(9).standard_normal((NUM, 3, 8, 8))
    return kinds[labels] + spread * random.standard_normal((len(labels), 3, 8, 8))


def part(num_right):
    """Return images of ten classes, of which the first ones are right, and others are taken for a
    similar class."""
    random = np.random.default_rng(8)
    logits = logits_of((LABELS + random.integers(1, 4, 400)) % NUM)
    logits[np.arange(400), LABELS] = np.where(np.arange(400) < num_right, 9, 5)
    return Images(pictures(np.random.default_rng(8), LABELS), LABELS, logits)


def judged(train, validation, is_early=False, **after):
    return evidence.judge_predictions(
        train,
        train,
        validation,
        {(name, 'x'): logits for name, logits in after.items()},
        sound_train=train,
        sound=validation,
        logged=validation.top1,
        is_early=is_early,
    )


@pytest.mark.parametrize(
    'taken, name, text',
    [
        *(((LABELS + k) % NUM, 'labels_shifted', f'{k:+d}') for k in (1, -1, 4)),
        (SWAP[LABELS], 'labels_swapped', '3 for 8, 8 for 3'),
        (CYCLE[LABELS], 'labels_swapped', '3 for 4, 4 for 5, 5 for 3'),
        (
            PERMUTED[LABELS],
            'labels_swapped',
            '1 for 0, 2 for 7, 3 for 1, 4 for 3, 5 for 6 and 3 more',
        ),
    ],
)
def test_other_labels_that_explain_predictions_are_named(taken, name, text):
    causes, now = judge_labels(LABELS, logits_of(taken))
    (cause,) = (c for c in causes if c.strength > 1)
    assert cause.name == name and text in cause.figure + cause.measured
    np.testing.assert_array_equal(now, taken)
    found = evidence.settle([*judged(part(400), part(400)._replace(labels=taken))])
    assert {*accused(found)} == {name}  # and no overfitting


@pytest.mark.parametrize(
    'permutation, right, expected',
    [
        *((np.arange(NUM), right, []) for right in (0.0, 0.1, 0.3, 0.6, 1.0)),
        (SWAP, 0.4, ['labels_swapped']),
        (CYCLE, 0.4, ['labels_swapped']),
    ],
)
def test_exchange_shows_in_a_weak_network(permutation, right, expected):
    labels = np.arange(1000) % NUM
    for seed in SEEDS:
        logits = weak_logits(np.random.default_rng(seed), permutation[labels], right)
        causes, now = judge_labels(labels, logits)
        assert accused(causes) == expected
        np.testing.assert_array_equal(now, permutation[labels])


EACH = np.arange(200)  # many classes with an image each


@pytest.mark.parametrize(
    'labels, logits, expected',
    [
        (LABELS, logits_of(np.full_like(LABELS, 7)), []),  # one class only
        (LABELS, logits_of(np.where(LABELS == 3, 8, LABELS)), []),  # one class lost
        (  # one class is ambiguous
            LABELS,
            logits_of(np.where((LABELS == 9) & (np.arange(400) % 3 > 0), 0, CYCLE[LABELS])),
            ['labels_swapped'],
        ),
        (EACH, np.random.default_rng(0).standard_normal((200, 200)), []),
        (EACH, 8 * np.roll(np.eye(200), 1, 1), ['labels_shifted']),
    ],
)
def test_predictions_and_the_permutations_that_explain_them(labels, logits, expected):
    assert accused(judge_labels(labels, logits)[0]) == expected


def test_wrong_labels_are_any_class_and_those_of_a_weak_network_a_similar_one():
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        for right in (0.2, 0.5, 0.75, 0.95):
            assert accused(judge_noise('', Images(None, *predictions(random, right)))) == []
        for share in (0.15, 0.4, 1.0):
            labels, logits = predictions(random, 0.9)
            wrong = np.where(random.random(2000) < share, random.integers(0, NUM, 2000), labels)
            (cause,) = judge_noise('', Images(None, wrong, logits))
            assert cause.name == 'label_noise' and cause.strength > 1
            measured = float(cause.measured.split()[0]) / 100
            assert measured == pytest.approx(share, rel=0.5) and measured <= 1


@pytest.mark.parametrize('spread', [0.5, 3.0])
def test_similar_images_show_random_labels_without_a_network(spread):
    random = np.random.default_rng(3)
    train, validation = (Images(pictures(random, LABELS, spread), LABELS, None) for _ in range(2))
    assert accused(evidence.judge_neighbours(train, validation)[0]) == []
    wrong = train._replace(labels=random.permutation(LABELS))
    for parts, split in (((wrong, validation), 'training'), ((validation, wrong), 'validation')):
        causes, fitting = evidence.judge_neighbours(*parts)
        (cause,) = (c for c in causes if c.strength > 1)
        assert cause.name == 'label_noise' and cause.figure.startswith(split)
        assert split not in fitting


def images(labels, first=0):
    return [(first + k, int(label)) for k, label in enumerate(labels)]


WHOLE, OTHERS = images(LABELS), images(LABELS, 5000)
LESS = LABELS[LABELS != 4]
RARE = np.repeat(np.arange(NUM), [2, *[100] * 9])


@pytest.mark.parametrize(
    'train, validation, cause, figure',
    [
        (images(LESS), OTHERS, 'classes_missing', 'training images: 1 of 10, such as 4'),
        (WHOLE, images(LESS, 5000), 'classes_missing', 'validation images: 1 of 10, such as 4'),
        (images(RARE), images(RARE, 5000), '', ''),  # in both splits
        (WHOLE, images(LABELS, 396), '', ''),
        (WHOLE, images(LABELS, 395), 'leak', ': 5'),
        (
            [*WHOLE, *((k, (label + 1) % NUM) for k, label in images(LABELS[:9]))],
            OTHERS,
            'label_noise',
            'with another label: 18',
        ),
        # one picture with many labels
        ([*WHOLE, *((1000, k % NUM) for k in range(40))], OTHERS, 'label_noise', ': 40'),
        ([*WHOLE, *images(LABELS[:100])], OTHERS, '', ''),
        ([*WHOLE, *images(LABELS[:200])], OTHERS, 'repeated_images', ': 200'),
    ],
)
def test_records_of_both_splits(train, validation, cause, figure):
    found = [c for c in evidence.judge_records(train, validation, NUM) if c.strength > 1]
    assert [c.name for c in found] == cause.split()
    assert all(f'{c.figure}: {c.measured}'.endswith(figure) for c in found)


@pytest.mark.parametrize(
    'before, after, keys, expected',
    table("""
200 | channel_order=300 | | channel_order=true
200 | channel_order=215 | |
4 | channel_order=60 | |
40 | channel_order=120 | fair=0.9 |
300 | channel_order=350 | train_top1=0.75 | channel_order=false
300 | channel_order=350 | train_top1=0.95 | channel_order=true
300 | batch_norm=350 | train_top1=0.95 | batch_norm=false
360 | batch_norm=50 value_range=150 | logged=0.12 | evaluation=true batch_norm=true
"""),
)
def test_change_after_which_more_images_are_right_or_as_many_as_logged(
    before, after, keys, expected
):
    """after: number of right images after a change; expected: whether each cause is certain.

    A small gain, chance, and what other labels explain are no causes. A change is less certain if
    training images are right as often.
    """
    logits = {(name, 'x'): part(now).logits for name, now in values(after).items()}
    before = int(before)
    keys = {'fair': 0.0, 'train_top1': 0.9, 'logged': before / 400, **values(keys)}
    found = evidence.judge_changes(part(before), logits, **keys)
    assert {c.name: c.strength > 3 for c in found if c.strength > 1} == values(expected)


def test_weights_that_only_decayed():
    random = np.random.default_rng(3)

    def drawn(size):
        return (size * random.standard_normal((40, 30))).astype(np.float32)

    initial = {name: drawn(1) for name in 'ab'}
    near = {name: a + drawn(1e-3) for name, a in initial.items()}
    frozen, slight = evidence.judge_weights(initial, near)
    assert (frozen.verdict, accused([frozen, slight])) == ('too early', ['gradient_scale'])
    moved = dict.fromkeys('ab', drawn(1))
    assert accused(evidence.judge_weights(initial, moved)) == []
    cause, _ = evidence.judge_weights(initial, {**moved, 'b': initial['b'] * np.float32(0.8)})
    assert (cause.name, cause.measured, cause.strength) == ('frozen', '1 of 2, such as b', 5)


@pytest.mark.parametrize(
    'top1, expected',
    table("""
0.99 0.98 0.9 |
1.0 1.0 0.5 | overfitting
0.8 0.8 0.5 |
0.9 0.4 0.85 | augmentation
0.3 0.9 0.3 | augmentation
0.6 0.6 0.8 |
1.0 1.0 0.1 |
"""),
)
def test_gaps_between_accuracies(top1, expected):
    """top1: on training images, on augmented ones and on validation images."""
    parts = (part(round(400 * float(x))) for x in top1.split())
    assert accused(evidence.judge_gaps(*parts)) == expected.split()


def details(random, detail, num=200, colour=1.0):
    """Return what is measured on images with a strength of fine detail and of colour."""
    coarse = np.kron(random.standard_normal((num, 1, 4, 4)), np.ones((4, 4)))
    fine, hue = random.standard_normal((num, 1, 16, 16)), random.standard_normal((num, 3, 1, 1))
    return evidence.measure_detail(coarse + detail * fine + colour * hue, (120.0,) * 3, (60.0,) * 3)


@pytest.mark.parametrize(
    'train, validation, expected',
    [
        ((0.5,), 0.6, set()),
        ((0.1,), 1.0, {'blur_or_noise'}),
        ((1.0,), 0.1, {'blur_or_noise'}),
        ((0.5, 200, 0.1), 0.5, {'colour'}),
    ],
)
def test_detail_and_colour_of_both_splits(train, validation, expected):
    random = np.random.default_rng(5)
    found = evidence.judge_detail(details(random, *train), details(random, validation))
    assert {*accused(found)} == expected


def test_few_or_empty_images_lose_no_detail_by_chance():
    few = ([details(np.random.default_rng((s, k)), 0.5, 10) for k in (0, 1)] for s in SEEDS)
    empty = evidence.measure_detail(np.zeros((5, 3, 8, 8)), (0.0,) * 3, (1.0,) * 3)
    for both in (*few, (empty, empty)):
        assert accused(evidence.judge_detail(*both)) == []


def test_labels_that_fit_similar_images_are_not_wrong():
    random = np.random.default_rng(11)
    sharp = Images(pictures(random, LABELS), LABELS, part(400).logits)
    garbled = sharp._replace(logits=random.permutation(sharp.logits))
    assert 'label_noise' not in accused(judged(sharp, garbled))
    wrong = sharp._replace(labels=random.permutation(LABELS))
    assert 'label_noise' in accused(judged(sharp, wrong))
    wrong = part(400)._replace(labels=np.random.default_rng(6).permutation(LABELS))
    assert {*accused(evidence.settle([*judged(part(400), wrong)]))} == {'label_noise'}


def test_change_of_images_explains_labels_and_gap():
    turned = part(400)._replace(logits=logits_of(SWAP[LABELS]))
    assert accused(judged(part(400), turned)) == ['labels_swapped']
    random = np.random.default_rng(10)
    lost = np.where(random.random(400) < 0.9, SWAP[LABELS], random.integers(0, NUM, 400))
    turned = turned._replace(logits=logits_of(lost))
    assert accused(evidence.settle([*judged(part(400), turned)])) == ['labels_swapped']
    found = judged(part(400), turned, normalisation=part(300).logits, orientation=part(400).logits)
    assert accused(found) == ['orientation']


@pytest.mark.parametrize('is_early, num_right', [(True, 400), (False, 60), (False, 110)])
def test_network_that_knows_too_little_is_judged_too_early(is_early, num_right):
    found = [*judged(part(num_right), part(40), is_early)]
    early = {c.name for c in found if c.verdict == 'too early'}
    assert accused(found) == []
    assert {'overfitting', 'augmentation', 'label_noise', 'labels_swapped'} <= early


def test_images_that_the_network_takes_for_few_classes_differ():
    random = np.random.default_rng(12)
    garbled = part(400)._replace(logits=logits_of(random.integers(0, 4, 400) ** 2))
    assert accused(evidence.settle([*judged(part(400), garbled)])) == ['images_differ']


def test_classes_of_predictions_vary_by_chance_and_with_the_labels():
    for num in (10, 100):
        for seed in SEEDS:
            random = np.random.default_rng(seed)
            splits = (
                Images(None, random.integers(0, num, n), random.standard_normal((n, num)))
                for n in (500, 250)
            )
            assert accused(evidence.judge_classes(*splits)) == []
    train, rare = part(400), LABELS < 6
    validation = Images(None, LABELS[rare], train.logits[rare])
    assert accused(evidence.judge_classes(train, validation)) == []


def test_only_the_cause_of_a_cause_is_accused():
    names = ['overfitting', 'label_noise', 'images_differ', 'blur_or_noise']
    causes = [Cause(n, 3.0, 'f', 'm', 'e', 'possible') for n in names]
    for k, name in enumerate(names):
        found = evidence.settle(causes[: k + 1])
        assert accused(found) == [name] and all(c.verdict == 'possible' for c in found)
    for detail, expected in ((2.5, []), (1.1, ['overfitting'])):  # splits with other detail
        other = weigh('blur_or_noise', 'fine detail', detail, 1 / 3, 3, strength=4.8)
        assert accused(evidence.settle([causes[0], other])) == expected


def test_printed_bounds_decide():
    """Each figure that is printed as beyond its bound is accused or possible, and no other one
    is."""
    random = np.random.default_rng(7)
    labels, logits = predictions(random, 0.6)
    rows = [weigh('a', 'f', x, 0.2, 0.25) for x in (0.25, 0.250004, 0.2501, 0.2, 0.19)]
    rows += judge_noise('training', Images(None, random.permutation(labels), logits))
    rows += judge_labels((labels + 1) % NUM, logits)[0][:1]
    rows += evidence.judge_gaps(part(400), part(100), part(200))
    assert len({c.verdict for c in rows}) == 2
    for c in rows:
        got = float(c.measured.split()[0])
        bounds = {word: float(x) for word, x in re.findall('(least|most) ([0-9.]+)', c.expected)}
        is_usual = bounds.get('least', 0) <= got <= bounds.get('most', 1e9)
        assert (c.verdict == 'usual') == is_usual == (c.strength <= 1), c
