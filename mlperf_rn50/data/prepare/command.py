"""The prepare command: the data set of the options, what is prepared already, and a first
configuration."""

import hashlib
import io
import os
import shlex
import statistics
from argparse import Namespace
from contextlib import suppress
from itertools import chain
from pathlib import Path

import imagesize
import yaml

from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.folders import folder, im2rec
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.prepare.pack import (
    OUTPUTS,
    PARTS,
    TRAIN_YAML,
    checksums_of,
    claim,
    digest_of_sources,
    pack,
)
from mlperf_rn50.data.prepare.samples import Dataset, digits
from mlperf_rn50.data.recordio import MANIFEST_NAME, REPAIR, RecordFile, load_manifest
from mlperf_rn50.data.verify import described, is_edited, verify
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, DataError
from mlperf_rn50.files import describe_disk, walk, write_atomically
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock
from mlperf_rn50.text import plural, printable, thin

_MAX_SIZED = 200  # number of images whose sizes are read for a configuration
_HEADER = """# {}
# A cautious start, not tuned. Numbers of images and classes are those of manifest.json, beside \
this file.
# Raise target_accuracy to train longer. Set mirror_probability to 0 if left and right matter, \
as in text.
# On GPUs, add device: gpu and precision: float16 to train. All keys: docs/configuration.md
"""


def prepare(options: Namespace) -> int:
    """Run the prepare command. Return the exit code."""
    num_workers = options.workers or len(os.sched_getaffinity(0))
    if options.verify is not None:
        intact, damaged = verify(Path(options.verify), num_workers)
        _print(*intact, *damaged)
        if damaged:
            _print(f'{options.verify}: damaged; {REPAIR}')
        return EXIT_FAILED if damaged else EXIT_OK
    out, name = Path(options.out), options.dataset
    is_own = name in ('folder', 'im2rec')
    if is_own:
        source = os.path.basename(os.path.realpath(options.source or ''))
        # other images must not count as ImageNet
        name = options.name or (source if source != IMAGENET else name)
        for option, text in (('--out', str(out)), ('--name', name)):
            if not text.isprintable():  # a line break, or not UTF-8
                raise ConfigError(
                    f'{option}: got {text!r}, expected printable text, because train.yaml has it'
                )
    try:
        if manifest := find_prepared(out, name):
            _check_same(manifest, options, name, num_workers)
            _print(f'{out}: {name} is already prepared; to prepare it again, use another --out')
        else:
            _prepare_new(options, name, num_workers)
        if is_own and name != IMAGENET:
            _print(f'next: {_write_train_yaml(out, name)}')
    except BrokenPipeError:  # of the output
        raise
    except OSError as e:
        if e.errno is None:  # not of a file: a library that MXNet lacks
            raise
        raise DataError(
            f'--out: {e.filename or out}: {e.strerror}; {describe_disk(out)}; free space or fix '
            'the permissions, then run prepare again (it keeps finished parts)'
        ) from e
    return EXIT_OK


def _print(*lines: str) -> None:
    """Print lines with names of classes and files, which are not trusted."""
    for line in lines:
        print(printable(line), flush=True)


def find_prepared(out: Path, dataset_name: str) -> dict | None:
    """Return the manifest of a folder that contains this data set, or None if it has no manifest.
    Raise DataError if it is another data set, or not complete."""
    if not os.path.lexists(out / MANIFEST_NAME):
        return None
    manifest = load_manifest(out)
    if manifest['dataset'] != dataset_name:
        raise DataError(
            f'--out: {out} contains {manifest["dataset"]}, expected {dataset_name}; use a new '
            'folder'
        )
    if is_edited(manifest):
        raise DataError(f'{out / MANIFEST_NAME}: does not match its own SHA-256; {REPAIR}')
    for split, entry in manifest['splits'].items():
        rec = out / f'{split}.rec'
        for path in (rec, *(path for key, path in described(rec).items() if key in entry)):
            if not path.is_file():
                raise DataError(f'{path}: missing, expected as listed in {MANIFEST_NAME}; {REPAIR}')
        if (size := rec.stat().st_size) != entry['rec_bytes']:
            raise DataError(f'{rec}: got {size:,} bytes, expected {entry["rec_bytes"]:,}; {REPAIR}')
    return manifest


def _find_dataset(options: Namespace, name: str) -> Dataset:
    source = Path(options.source) if options.source else None
    try:
        if options.dataset == 'digits':
            return digits()
        if options.dataset == 'cifar10':
            return cifar10(source)
        if source is None:
            raise DataError(
                f'--source: missing; expected the folder of the {options.dataset} images'
            )
        if options.dataset == 'imagenet':
            truth = options.ground_truth and Path(options.ground_truth)
            return imagenet(source, truth, options.allow_partial)
        if options.dataset == 'im2rec':
            return im2rec(source, name)
        return folder(source, name, options.validation)
    except OSError as e:
        is_link = isinstance(e, FileNotFoundError) and os.path.islink(e.filename)
        reason = 'link to a missing file' if is_link else e.strerror
        raise DataError(
            f'--source: {e.filename or source}: {reason}; repair, move or remove it'
        ) from e


def _find_state(options: Namespace) -> str:
    """Return a digest of options, and of name, size, time of change and inode of each file of the
    source, unread.

    Return '' if the source is missing.
    """
    root = Path(options.source or '')
    if not os.path.exists(root):
        return ''
    files = [options.source]
    if options.dataset == 'im2rec':  # resolved, because --out may be the same folder
        used: list[Path] = []
        with suppress(OSError):  # no readable folder, which is refused later
            used = [p for p in root.iterdir() if p.suffix in ('.rec', '.idx', '.lst')]
        files = sorted({*map(os.path.realpath, used)})
    elif root.is_dir() and options.source:
        files = [
            os.path.join(parent, name)
            for parent, _, names in walk(root, lambda _: None)
            if PARTS not in Path(parent).relative_to(root).parts
            for name in names
            if name not in OUTPUTS
        ]
    state = [options.validation, options.resize_shorter]
    for path in filter(None, [options.ground_truth, *files]):
        with suppress(OSError):  # a link to nothing
            found = os.stat(path)
            name = path.removeprefix(str(root))
            state.append((name, found.st_size, found.st_ctime_ns, found.st_ino))
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _check_same(manifest: dict, options: Namespace, name: str, num_workers: int) -> None:
    """Raise DataError if the source has other classes or images than when it was prepared.

    Images are read only if the state of a file has changed. Older manifests have no state; for
    these, only the classes and numbers of images in folders are compared.
    """
    state = _find_state(options)
    unknown = '' if options.dataset == 'folder' else state
    if state in ('', manifest.get('source_state', unknown)):
        return
    found, skipped = _find_dataset(options, name), {*manifest.get('skipped', ())}
    splits = found.train, found.validation
    now = [sum(s.name not in skipped for s in samples) for samples in splits]
    before = [split['num_images'] for split in manifest['splits'].values()]
    if (now, found.classes) != (before, manifest['classes']):
        raise DataError(
            f'--source: got {now} images of {len(found.classes)} classes, expected {before} of '
            f'{len(manifest["classes"])}, as in --out; use another --out'
        )
    if 'source_sha256' in manifest:
        checksums = checksums_of([*chain(*splits)], num_workers)
        digest = digest_of_sources(found, options.resize_shorter, checksums)
        if digest != manifest['source_sha256']:
            raise DataError(
                '--source: got other images, names, labels or --resize-shorter than those in '
                f'{options.out}; use another --out'
            )


def _prepare_new(options: Namespace, name: str, num_workers: int) -> None:
    out, state = Path(options.out), _find_state(options)
    found = _find_dataset(options, name)
    if len(found.classes) < 2:
        advice = ''
        if options.dataset == 'folder':
            advice = '; put the images of each class into a folder of its own'
        raise DataError(f'--source: got 1 class ({found.classes[0]}), expected 2 or more{advice}')
    _print(*found.notes)
    with folder_lock(out, '--out', OUTPUT_LOCK):
        claim(out, found, has_config=options.dataset in ('folder', 'im2rec'))
        manifest = pack(
            found,
            out,
            num_workers=num_workers,
            resize_shorter=options.resize_shorter,
            skip_damaged=options.skip_corrupt,
            state=state,
        )
    for split, entry in manifest['splits'].items():
        _print(
            f'{out}/{split}.rec: {entry["num_images"]:,} images of {name}, '
            f'{entry["rec_bytes"] / 1e6:,.1f} MB'
        )
    if manifest['skipped']:
        _print(
            f'skipped {plural(len(manifest["skipped"]), "damaged image")}, listed in '
            f'{out / MANIFEST_NAME}'
        )


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


def _write_train_yaml(out: Path, name: str) -> str:
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
