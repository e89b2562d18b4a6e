"""Trained weights of a run, stored with the description needed to use them.

weights/ in a run folder contains best.npz and best.json, and last.npz and last.json if the last
network differs. The files are not trusted. They are read without pickle, and each .npz is checked
against the SHA-256 in its .json.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from mlperf_rn50 import __version__, files
from mlperf_rn50.config import Config, for_evaluation, to_tree
from mlperf_rn50.config_file import check_keys
from mlperf_rn50.errors import DataError, UserError
from mlperf_rn50.npz import Arrays, read_arrays
from mlperf_rn50.runfolder.names import folder_index

FORMAT = 1
BEST, LAST = 'best', 'last'
# Keys that determine the preprocessing of the input, and the images on which the accuracy was
# measured.
DATA_KEYS = tuple(
    'dir dataset num_val num_classes synthetic image_size resize_shorter interpolation mean std '
    'decoder pad_to_4_channels'.split()
)
_ADDED_DATA_KEYS = ('eval_flip',)  # keys that descriptions of 0.6.0 and older lack
TRAIN_KEYS = ('precision', 'device', 'eval_batch_size')
_MAX_BYTES = 1 << 26  # maximum size of a description, which contains the names of all classes


@dataclass(frozen=True)
class WeightsDescription:
    program_version: str
    model: dict[str, Any]
    data: dict[str, Any]  # contains DATA_KEYS, which inference needs
    train: dict[str, Any]
    classes: tuple[str, ...]
    epoch: int
    seed: int
    is_best: bool
    is_last: bool
    top1: float | None = None  # a fraction; like the counts, None if there was no evaluation
    num_top1: int | None = None
    num_top5: int | None = None
    num_images: int | None = None
    sha256: str = ''
    data_sha256: str = ''  # data_digest() of the images; '' for synthetic images and in older files

    def tree(self) -> dict[str, Any]:
        """Return the configuration for these weights, as sections with keys."""
        return {
            'model': self.model,
            'data': self.data,
            'train': {**self.train, 'local_batch_size': self.train['eval_batch_size']},
        }


def describe_weights(
    config: Config,
    classes: Sequence[str],
    eval_batch_size: int,
    epoch: int,
    seed: int,
    **more: Any,
) -> WeightsDescription:
    """Return the description of a run's network. more: the other fields, such as is_best, is_last
    and those of its accuracy."""
    tree = to_tree(for_evaluation(config))
    train = {**tree['train'], 'eval_batch_size': eval_batch_size}
    return WeightsDescription(
        program_version=__version__,
        model=tree['model'],
        data={k: tree['data'][k] for k in (*DATA_KEYS, *_ADDED_DATA_KEYS)},
        train={k: train[k] for k in TRAIN_KEYS},
        classes=tuple(classes),
        epoch=epoch,
        seed=seed,
        **more,
    )


def write_npz(file: BinaryIO, arrays: Arrays) -> str:
    """Write arrays as .npz. Return its SHA-256."""
    hashed = files.HashedFile(file)
    np.savez(hashed, **arrays)
    return hashed.hexdigest()


def save_weights(folder: Path, stem: str, description: WeightsDescription, arrays: Arrays) -> None:
    """Write <stem>.npz and .json atomically. Raise StorageError (disk fault) or UserError."""
    path = folder / f'{stem}.npz'
    try:
        files.make_folder(folder)
        with files.replacing(path) as f:
            description = replace(description, sha256=write_npz(f, arrays))
            files.sync(f)  # after an error of the disk, both files are the old ones
            tree = {'format': FORMAT, **asdict(description)}
            files.dump_json(path.with_suffix('.json'), tree, indent=1)
    except OSError as e:
        if e.errno in files.DISK_FAULTS:
            raise files.storage_error(path, e, 'the weights') from e
        raise UserError(
            f'{path}: cannot write the weights: {e.strerror}; free space or fix the permissions'
        ) from e


def put_aside_later(folder: Path, epoch: int) -> None:
    """Rename the networks of later epochs than that from which a run resumes, because the run may
    not train them again; raise StorageError on failure."""
    for stem in (BEST, LAST):
        path = folder / f'{stem}.npz'
        try:
            is_later = _describe(path).epoch > epoch
        except DataError:  # missing or damaged
            continue
        if is_later:
            for part in (path, path.with_suffix('.json')):
                # A kill between the two files of a network may leave only its .json.
                with files.writing(part), suppress(FileNotFoundError):
                    part.rename(part.with_name(f'abandoned_{part.name}'))


def best_top1(folder: Path) -> float | None:
    """Return Top-1 of the best network of a weights folder, as a fraction; None if there is no such
    network."""
    path = folder / f'{BEST}.npz'
    with suppress(DataError):
        return _describe(path).top1 if path.exists() else None
    return None


def find_weights(path: Path, which: str = BEST) -> Path:
    """Return the .npz for an .npz, a weights folder or a run folder (its newest run). Raise
    UserError if missing."""
    files.check_exists(path, 'a run folder, its weights folder or an .npz')
    if not path.is_dir():
        return path
    folders = [path, *(p for p in path.iterdir() if re.fullmatch(r'weights(_\d+)?', p.name))]
    kept = [p for p in folders if (p / f'{BEST}.npz').is_file()]
    if not kept:
        raise UserError(
            f'{path}: contains no weights, expected weights/{BEST}.npz; a run writes them with its '
            'first checkpoint after an evaluation and at its end'
        )
    folder = path if path in kept else max(kept, key=folder_index)
    last = folder / f'{LAST}.npz'
    best = folder / f'{BEST}.npz'
    # A last.npz of an earlier epoch than best.npz dates from before the run was resumed.
    if which == LAST and last.is_file() and _describe(last).epoch > _describe(best).epoch:
        return last
    return best


def load_weights(path: Path) -> tuple[WeightsDescription, Arrays]:
    """Load the description and arrays that find_weights() finds. Raise UserError if missing,
    DataError if damaged."""
    npz = find_weights(path)
    description = _describe(npz)
    try:
        data = files.read_bytes(npz)
        got = hashlib.sha256(data).hexdigest()
        if got != description.sha256:
            raise DataError(
                f'{npz}: got SHA-256 {got[:12]}…, expected {description.sha256[:12]}… from '
                f'{npz.stem}.json; copy both files again'
            )
        arrays = read_arrays(data)
    except (OSError, ValueError) as e:
        raise _damaged(npz, e) from e
    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float16):
            raise DataError(
                f'{npz}: {name}: got {array.dtype}, expected float32 or float16 as written by '
                'this program'
            )
    return description, arrays


def _damaged(path: Path, error: Exception) -> DataError:
    reason = ' '.join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return DataError(
            f'{error.filename}: missing; expected an .npz and a .json of the same name'
        )
    return DataError(
        f'{path}: not weights of this program ({reason}); expected files from the weights folder '
        'of a run'
    )


def _describe(npz: Path) -> WeightsDescription:
    """Return the validated description of an .npz."""
    path = npz.with_suffix('.json')
    try:
        content = files.parse_json(files.read_text(path, _MAX_BYTES))
        if not isinstance(content, dict) or content.get('format') != FORMAT:
            raise ValueError(f'expected format {FORMAT}')
        description = msgspec.convert(content, WeightsDescription)
        needed = {'data': DATA_KEYS, 'train': TRAIN_KEYS, 'model': ('name', 'layout')}
        for section, keys in needed.items():
            if missing := [key for key in keys if key not in content[section]]:
                raise ValueError(f'{section}.{missing[0]} is missing')
        check_keys({section: content[section] for section in needed})
        num_classes = description.data['num_classes']
        if (num := len(description.classes)) != num_classes:
            raise ValueError(f'classes: got {num}, expected data.num_classes={num_classes} names')
        return description
    except (OSError, ValueError, UserError, msgspec.MsgspecError) as e:
        raise _damaged(path, e) from e


def portable(config: Config, arrays: Arrays) -> tuple[Config, Arrays]:
    """Return configuration (for evaluations) and arrays of the same network for any CPU: float32,
    NCHW, RGB, not fused.

    set_weights converts the arrays; here, only the zero channel of a padded first convolution is
    dropped.
    """
    data = replace(for_evaluation(config).data, pad_to_4_channels=False, decoder='cpu')
    model = replace(config.model, layout='NCHW', fused_bn_relu=None, fused_bn_add_relu=None)
    train = replace(config.train, precision='float32', device='cpu')
    if config.data.pad_to_4_channels:
        axis = 3 if config.model.layout == 'NHWC' else 1
        padded = {n: a for n, a in arrays.items() if a.ndim == 4 and a.shape[axis] == 4}
        arrays = {**arrays, **{n: a.take(range(3), axis) for n, a in padded.items()}}
    return replace(config, data=data, model=model, train=train), arrays


def _with_shape(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array, transposed between NCHW and NHWC if only then it has this shape."""
    if array.ndim == 4 and array.shape != shape:
        for order in ((0, 3, 1, 2), (0, 2, 3, 1)):
            if array.transpose(order).shape == shape:
                return array.transpose(order)
    return array


def set_weights(net: Any, arrays: Arrays, has_other_classes: bool = False) -> list[str]:
    """Copy arrays of either layout to a network. Return a note if its last layer is left out for
    other classes.

    Raise UserError if more differs. has_other_classes: leave it out even if the numbers of classes
    are equal.
    """
    import mxnet as mx

    params = dict(net.collect_params().items())
    arrays = {n: _with_shape(a, params[n].shape) if n in params else a for n, a in arrays.items()}
    missing = {'weights': params.keys() - arrays, 'network': arrays.keys() - params}
    for holder, names in missing.items():
        if names:
            raise UserError(
                f'weights: {min(names)} is missing in the {holder} ({len(names)} such names); '
                'expected the same model.name'
            )
    fresh = _fresh_layer(params, arrays)
    left_out = list(params)[-2:] if has_other_classes else fresh
    for name, param in params.items():
        if name not in fresh and arrays[name].shape != param.shape:
            raise UserError(
                f'weights: {name}: got shape {arrays[name].shape}, expected {param.shape}; use the '
                'same model.name and data.pad_to_4_channels'
            )
    for name in set(params) - set(left_out):
        for array in params[name].list_data():
            # Let MXNet copy the values, because an array that a graph has used may be in oneDNN's
            # layout.
            mx.nd.array(arrays[name], dtype=array.dtype).copyto(array)
    if not left_out:
        return []
    kind = '' if fresh else 'other '
    old, new = (layers[left_out[0]].shape[0] for layers in (arrays, params))
    return [
        f'the weights are for {old} {kind}classes, the data has {new}; the last layer '
        f'({", ".join(left_out)}) is newly initialised'
    ]


def _fresh_layer(params: dict[str, Any], arrays: Arrays) -> list[str]:
    """Return the names of the last layer's weight and bias if only the number of classes differs,
    otherwise []."""
    last = list(params)[-2:]
    old = [arrays[n].shape for n in last]
    new = [params[n].shape for n in last]
    differs = all(a and b and a[0] != b[0] and a[1:] == b[1:] for a, b in zip(old, new))
    return last if differs and old[0][0] == old[1][0] else []
