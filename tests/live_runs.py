"""Run folders of unfinished runs, for tests of watch."""

import json
import os

from lines import START_S, complete, run_lines, write_lines

CONFIG = (
    'schedule: {decay_epochs: 12.0}\ntrain: {max_epochs: 10, global_batch_size: 64, target_accuracy: '
    '0.749}\n'
)


def train(step, *, steps=20, step_s=0.5, **keys):
    """Return the training record of a step."""
    return {
        'event': 'train',
        'step': step,
        'epoch': step / steps,
        'time_s': step * step_s,
        'loss': 2.0,
        'learning_rate': 0.1,
        'images_per_s': 128.0,
        **keys,
    }


def evaluation(epoch, hits, *, images=100, steps=20, step_s=0.5):
    """Return an evaluation record."""
    return {
        'event': 'eval',
        'epoch': epoch,
        'time_s': epoch * steps * step_s,
        'num_top1': hits,
        'num_top5': images,
        'num_images': images,
        'dataset': 'digits',
    }


def rank(number, compute_s, host='n1'):
    """Return the times of a rank for ten steps."""
    return {
        'rank': number,
        'host': host,
        'cores': '0',
        'num_steps': 10,
        'data_s': 0.0,
        'compute_s': compute_s,
        'wait_s': 0.5,
    }


def reference(*epochs, **keys):
    """Return a reference record with a band of 45 to 55 % at some epochs."""
    return {
        'event': 'reference',
        'how': 'named',
        'num_reference': 5,
        'sources': ['a'],
        'text': 'reference: 5 runs',
        'target': 0.749,
        'reference_epochs': [4, 6],
        'band': [[e, e / 10, 0.5, 0.45, 0.55, 5] for e in epochs],
        **keys,
    }


def course(epoch, **keys):
    """Return the course record of an evaluation."""
    return {
        'event': 'course',
        'epoch': epoch,
        'point': epoch / 10,
        'accuracy': 0.5,
        'mean': 0.5,
        'low': 0.45,
        'high': 0.55,
        'num_reference': 5,
        'below': False,
        'behind': False,
        'reference_epochs': [4, 6],
        'seconds_left': [20.0, 40.0],
        'text': 'on course: 5 of 5 reference runs',
        **keys,
    }


def write_metrics(path, *records):
    """Write metrics.jsonl; text records are written unchanged."""
    path.write_text(''.join(r if isinstance(r, str) else json.dumps(r) + '\n' for r in records))
    return path


def write_live(
    folder, *records, number=0, age_s=3.0, status=None, accuracies=(0.2,), config=CONFIG, **keys
):
    """Write a run folder whose files are age_s old at NOW_S, when the tests read it."""
    suffix = f'_{number}' if number else ''
    log = write_lines(
        folder / f'result_{number}.txt',
        complete(
            run_lines(
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
        ),
    )
    metrics = write_metrics(folder / f'metrics{suffix}.jsonl', *records)
    (folder / f'config{suffix}.yaml').write_text(config)
    for path in (log, metrics):
        os.utime(path, (NOW_S - age_s,) * 2)
    return folder


NOW_S = START_S + 30.0
