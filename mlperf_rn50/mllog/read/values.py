"""Values of log lines: keys of v0.5, whole numbers, epochs and changes. Pure functions."""

import math
import re
from typing import Any

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN
from mlperf_rn50.runfolder.jsonl import number

MAX_EPOCH = 10**6
V05_KEYS = {  # tags of v0.5 and the later keys with the same meaning
    'run_clear_caches': keys.CACHE_CLEAR,
    'run_set_random_seed': keys.SEED,
    'train_epoch': keys.EPOCH_START,
    'preproc_num_train_examples': keys.TRAIN_SAMPLES,
    'eval_size': keys.EVAL_SAMPLES,
    'eval_target': events.TARGET_ACCURACY,
    'opt_learning_rate': keys.OPT_BASE_LR,
}


def integer(value: Any, low: int = 0, high: int = 10**12) -> int | None:
    """Return a whole number in the range, given as a number or as text; None for anything else."""
    is_text = isinstance(value, str) and re.fullmatch(r'\d{1,12}', value, re.ASCII)
    parsed = number(int(value) if is_text else value, low, high)
    return int(parsed) if parsed is not None and parsed == int(parsed) else None


def changes(event: LogEvent) -> dict[str, list]:
    """Return the configuration keys that a resume has changed, with the values before and now."""
    changed = event.metadata.get('changed')
    pairs = changed.items() if isinstance(changed, dict) else ()
    return {key: values for key, values in pairs if isinstance(values, list) and len(values) == 2}


def epoch_number(value: Any) -> int | None:
    """Return an epoch number; some logs compute it from steps, with a small error."""
    near = number(value, 0, MAX_EPOCH)
    if near is not None and abs(near - round(near)) <= 0.02:
        return round(near)
    return integer(value, 0, MAX_EPOCH)


def epoch_of(event: LogEvent, num_train: Any, batch: Any) -> int | None:
    """Return the epoch of an event, counted from 1, or None if it has none. An accuracy is not an
    epoch.

    Args:
        num_train, batch: logged numbers of training images and of images per step.
    """
    if event.line_format == 'MLPv0.5.0':  # counts from 0
        value = event.value
        if isinstance(value, dict):
            value = value.get('epoch')
        elif event.key == keys.EVAL_ACCURACY:
            return None
        epoch = epoch_number(value)
        return None if epoch is None else epoch + 1
    epoch = epoch_number(event.metadata.get('epoch_num'))
    return _epoch_of_samples(event, num_train, batch) if epoch is None else epoch


def _epoch_of_samples(event: LogEvent, num_train: Any, batch: Any) -> int | None:
    """Return the epoch of samples_count, which recent rounds log instead; an epoch may have whole
    steps only."""
    samples = integer(event.metadata.get('samples_count'))
    if samples is None:
        return None
    images = integer(num_train, 1) or IMAGENET_TRAIN
    step = integer(batch, 1) or 1
    for size in (images, math.ceil(images / step) * step):
        epoch = epoch_number(samples / size)
        if epoch is not None:
            is_start = event.key in (keys.EPOCH_START, keys.BLOCK_START)
            return epoch + 1 if is_start else epoch
    return None
