"""Run folders of unfinished runs, for tests of watch."""

import json
import os

from lines import START_S, complete, run_lines, write_lines

CONFIG = (
    'schedule: {decay_epochs: 12.0}\n'
    'train: {max_epochs: 10, global_batch_size: 64, target_accuracy: 0.749}\n'
)
STEPS, STEP_S = 20, 0.5  # of an epoch
NOW_S = START_S + 30.0
# records without the values that the functions below add
TRAIN = json.loads('{"event": "train", "loss": 2.0, "learning_rate": 0.1, "images_per_s": 128.0}')
EVAL = json.loads('{"event": "eval", "num_top5": 100, "num_images": 100, "dataset": "digits"}')
RANK = json.loads('{"cores": "0", "num_steps": 10, "data_s": 0.0, "wait_s": 0.5}')
RANKS = json.loads('{"event": "ranks", "epoch": 3, "time_s": 30.0}')
REFERENCE = json.loads(
    '{"event": "reference", "how": "named", "num_reference": 5, "sources": ["a"], '
    '"text": "reference: 5 runs", "target": 0.749, "reference_epochs": [4, 6]}'
)
COURSE = json.loads(
    '{"event": "course", "accuracy": 0.5, "mean": 0.5, "low": 0.45, "high": 0.55, '
    '"num_reference": 5, "below": false, "behind": false, "reference_epochs": [4, 6], '
    '"seconds_left": [20.0, 40.0], "text": "on course: 5 of 5 reference runs"}'
)
RESUMED = json.loads(
    '{"event": "resumed", "number_of_ranks": 8, "number_of_nodes": 4, "global_batch_size": 256}'
)


def train(step, **keys):
    """Return the training record of a step."""
    return {**TRAIN, 'step': step, 'epoch': step / STEPS, 'time_s': step * STEP_S, **keys}


def evaluation(epoch, hits):
    """Return the record of an evaluation on 100 images."""
    return {**EVAL, 'epoch': epoch, 'time_s': epoch * STEPS * STEP_S, 'num_top1': hits}


def rank(number, compute_s, host='n1'):
    """Return the times of a rank for ten steps."""
    return {**RANK, 'rank': number, 'host': host, 'compute_s': compute_s}


def times(*ranks, stragglers=()):
    """Return the record of the times of ranks."""
    return {**RANKS, 'ranks': ranks, 'stragglers': stragglers}


def reference(*epochs, **keys):
    """Return a reference record with a band of 45 to 55 % at some epochs."""
    return {**REFERENCE, 'band': [[e, e / 10, 0.5, 0.45, 0.55, 5] for e in epochs], **keys}


def course(epoch, **keys):
    """Return the course record of an evaluation."""
    return {**COURSE, 'epoch': epoch, 'point': epoch / 10, **keys}


def resumed(step, **keys):
    """Return the record of a resume on 8 ranks of 4 nodes."""
    return {**RESUMED, 'step': step, **keys}


def write_metrics(path, *records, mode='w'):
    """Write metrics.jsonl; text records are written unchanged."""
    with open(path, mode) as f:
        f.writelines(r if isinstance(r, str) else json.dumps(r) + '\n' for r in records)
    return path


def write_live(folder, *records, number=0, age_s=3.0, status=None, accuracies=(0.2,), **keys):
    """Write a run folder whose files are age_s old at NOW_S, when the tests read it."""
    suffix = f'_{number}' if number else ''
    lines = run_lines(
        accuracies,
        status=status,
        nodes=2,
        ranks=2,
        accelerators=False,
        target=0.749,
        train_samples=1437,
        dataset='digits',
        division='open',
        **keys,
    )
    log = write_lines(folder / f'result_{number}.txt', complete(lines))
    metrics = write_metrics(folder / f'metrics{suffix}.jsonl', *records)
    (folder / f'config{suffix}.yaml').write_text(CONFIG)
    for path in (log, metrics):
        os.utime(path, (NOW_S - age_s,) * 2)
    return folder
