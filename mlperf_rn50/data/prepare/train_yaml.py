"""A first configuration for a user's own images: <out>/train.yaml, from their number and sizes."""

import io
import os
import shlex
import statistics
from pathlib import Path

import imagesize
import yaml

from mlperf_rn50.data.records import RecordFile
from mlperf_rn50.files import write_atomically
from mlperf_rn50.text import thin

TRAIN_YAML = 'train.yaml'
_MAX_SIZED = 200  # number of images whose sizes are read
_HEADER = """# {}
# A cautious start, not tuned. Numbers of images and classes are those of manifest.json, beside this file.
# Raise target_accuracy to train longer. Set mirror_probability to 0 if left and right matter, as in text.
# On GPUs, add device: gpu and precision: float16 to train. All keys: docs/configuration.md
"""


def make_tree(out: Path, name: str, num_train: int, side: int) -> dict[str, dict]:
    """Return a configuration for images with a shorter side of `side` pixels; about 1,000 steps in
    30 to 90 epochs."""
    image_size = min(224, max(32, side // 16 * 16))
    batch = 1 << min(8, max(4, (num_train // 16).bit_length() - 1))  # from 16 to 256
    epochs = min(90, max(30, 1000 * batch // num_train))
    return {
        'run': {'dir': f'logs/{name}', 'metrics_period_steps': 5},
        'data': {
            'dir': str(out),
            'image_size': image_size,
            'resize_shorter': min(256, max(image_size, side)),
            'min_area': 0.25,
            'mirror_probability': 0.5,
        },
        'model': {'zero_gamma': True},
        'schedule': {'base_lr': 0.1 * batch / 256, 'warmup_epochs': 5, 'decay_epochs': epochs},
        'train': {
            'global_batch_size': batch,
            'label_smoothing': 0.1,
            'target_accuracy': 0.749,
            'eval_period': 1,
        },
        'checkpoint': {'period_epochs': 10, 'keep': 1},
    }


def write_train_yaml(out: Path, name: str) -> str:
    """Write train.yaml unless it exists, because the user may have changed it; return the command
    to train with it."""
    path = out / TRAIN_YAML
    command = f'launch/local.sh --config {shlex.quote(str(path))} --ranks-per-node 2'
    if not os.path.lexists(path):
        records = RecordFile(out / 'train.rec')
        images = (records.read(k).image.tobytes() for k in thin(range(len(records)), _MAX_SIZED))
        side = round(statistics.median(min(imagesize.get(io.BytesIO(image))) for image in images))
        text = yaml.safe_dump(
            make_tree(out, name, len(records), side),
            sort_keys=False,
            default_flow_style=None,
            allow_unicode=True,
        )
        write_atomically(path, _HEADER.format(command) + text)
    return command
