"""Log lines of all rounds with given times, and logs of such lines."""

import json
from pathlib import Path

START_S = 1_600_000_000.0


def mllog(key, time_s, value=None, **metadata):
    """Return a :::MLLOG line, time_s after START_S."""
    return ':::MLLOG ' + json.dumps(
        {
            'namespace': '',
            'time_ms': round(1e3 * (START_S + time_s)),
            'event_type': 'X',
            'key': key,
            'value': value,
            'metadata': metadata,
        }
    )


def v06(key, time_s, value=None, **metadata):
    """Return a :::MLL line."""
    return f':::MLL {START_S + time_s:.3f} {key}: ' + json.dumps(
        {'value': value, 'metadata': metadata}
    )


def v05(key, time_s, value=None):
    """Return a :::MLPv0.5.0 line."""
    end = '' if value is None else f': {json.dumps(value)}'
    return f':::MLPv0.5.0 resnet {START_S + time_s:.9f} (main.py:1) {key}{end}'


def run_lines(
    accuracies=(0.5, 0.76),
    *,
    epoch_s=10.0,
    first_s=None,
    eval_s=1.0,
    status='success',
    seed=1,
    nodes=1,
    ranks=4,
    batch=64,
    target=None,
    period=1,
    train_samples=1_281_167,
    accelerators=True,
    optimizer=None,
    division='closed',
    org='us',
    platform=None,
    **extra,
):
    """Return the lines of a v0.7+ run: initialisation at -5 s, run_start at 0, an evaluation every
    `period` epochs.

    Args:
        first_s: duration of the first epoch; None means epoch_s.
        status: status of run_stop; None omits run_stop.
        extra: additional keys and values, each logged once.
    """
    lines = [
        mllog('submission_benchmark', -6, 'resnet'),
        mllog('submission_org', -6, org),
        mllog('submission_division', -6, division),
        mllog('submission_platform', -6, platform or f'{nodes}xbox'),
        *[mllog('init_start', -5)] * ranks,
        mllog('seed', -4, seed),
        mllog('global_batch_size', -4, batch),
        mllog('opt_name', -4, 'sgd'),
        mllog('init_stop', -1),
        mllog('run_start', 0),
        mllog('train_samples', 0, train_samples),
        mllog('eval_samples', 0, 50000),
    ]
    lines += [
        mllog(k, 0, v)
        for k, v in {**(optimizer or {'sgd_opt_base_learning_rate': 0.1}), **extra}.items()
    ]
    if target is not None:
        lines.append(mllog('target_accuracy', 0, target))
    if not accelerators:
        lines += [
            mllog('number_of_ranks', 0, ranks),
            mllog('number_of_nodes', 0, nodes),
            mllog('accelerators_per_node', 0, 0),
        ]
    now, epoch = 0.0, 0
    for accuracy in accuracies:
        for _ in range(period):
            epoch += 1
            lines.append(mllog('epoch_start', now, epoch_num=epoch))
            now += first_s if epoch == 1 and first_s is not None else epoch_s
            lines.append(mllog('epoch_stop', now, epoch_num=epoch))
        lines.append(mllog('eval_start', now, epoch_num=epoch))
        now += eval_s
        lines += [
            mllog('eval_accuracy', now, accuracy, epoch_num=epoch),
            mllog('eval_stop', now, epoch_num=epoch),
        ]
    if status is not None:
        lines.append(mllog('run_stop', now, status=status))
    return lines


# Keys that the rules of v0.7 to v4.0 require of an sgd run, besides those of run_lines.
_REQUIRED = {
    'submission_status': 'onprem',
    'cache_clear': True,
    'gradient_accumulation_steps': 1,
    'sgd_opt_end_learning_rate': 0.0001,
    'sgd_opt_learning_rate_decay_poly_power': 2,
    'sgd_opt_learning_rate_decay_steps': 100,
    'sgd_opt_weight_decay': 0.0001,
    'sgd_opt_momentum': 0.9,
    'model_bn_span': 32,
    'opt_learning_rate_warmup_epochs': 5,
}


def complete(lines):
    """Return the lines of run_lines so that the official checkers pass them. Line numbers do not
    change."""
    return ['\r'.join([lines[0], *(mllog(k, -6, v) for k, v in _REQUIRED.items())]), *lines[1:]]


def write_lines(path, lines):
    """Write a log; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(lines) + '\n')
    return path


def write_set(folder, num_runs=5, is_complete=False, **keys):
    """Write a set of runs with different seeds; keys are arguments of run_lines or functions of the
    run number."""
    for k in range(num_runs):
        values = {name: value(k) if callable(value) else value for name, value in keys.items()}
        lines = run_lines(**{'seed': k + 1, **values})
        write_lines(Path(folder) / f'result_{k}.txt', complete(lines) if is_complete else lines)
    return Path(folder)
