"""ImageNet (ILSVRC2012) from its two tars, read in place, or from synset folders."""

import os
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mlperf_rn50.data.prepare.folders import (
    ENDINGS,
    by_role,
    contents,
    is_hidden,
    label,
    read_classes,
    scan,
    unused,
)
from mlperf_rn50.data.prepare.samples import TAR_ERRORS, Dataset, Sample, check_name
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import open_regular, read_text
from mlperf_rn50.text import apart, some

COUNTS = (1_281_167, 50_000, 1000)  # numbers of training images, validation images and classes
_MAX_TEXT_BYTES = 1 << 28


def _members(
    file: BinaryIO, where: str, part: tuple[int, int], endings: tuple[str, ...], folder: str = ''
) -> tuple[list[Sample], Counter[str]]:
    """Return the files with these endings in a tar, in order of name, and numbers of other entries.

    Args:
        where: path for messages.
        part: start and end of the tar in the file, in bytes.
        folder: part of the names, for a tar in a tar.
    """
    samples, others = dict[str, Sample](), Counter[str]()
    try:
        file.seek(part[0])
        with tarfile.open(fileobj=file, mode='r:') as tar:
            for member in tar:
                if member.size < 0:
                    raise tarfile.TarError(f'{member.name} has {member.size} bytes')
                parts = PurePosixPath(member.name).parts
                ending = os.path.splitext(member.name)[1].lower()
                if any(map(is_hidden, parts)):
                    others['hidden'] += 1
                elif member.isdir():
                    continue
                elif ending not in endings:
                    others[ending or 'without ending'] += 1
                elif not member.isreg() or member.issparse() or parts[-1] in samples:
                    raise tarfile.TarError(f'{member.name} is a link, has holes, or is there twice')
                else:
                    name = check_name(f'{Path(file.name).name}/{folder}{parts[-1]}')
                    start = member.offset_data
                    sample = Sample(-1, name, path=file.name, offset=start, size=member.size)
                    samples[parts[-1]] = sample
        # Readers of tars take a block of zeros, a damaged header and the end of the file as the end
        # of the archive. It has two blocks of zeros, and more up to a multiple of 20 blocks or of
        # another number (tar -b 128).
        size, block = part[1] - part[0], tarfile.BLOCKSIZE
        most = 2 * block + max(20 * block, min(size & -size, 1 << 20))
        file.seek(tar.offset)
        rest = file.read(max(0, min(part[1] - tar.offset, most + 1)))
        if not block <= len(rest) <= most or rest.strip(b'\0'):
            raise tarfile.TarError(f'it is cut or has a hole at byte {tar.offset - part[0]}')
    except TAR_ERRORS as e:
        raise DataError(
            f'imagenet: {where}: not a readable, uncompressed tar ({" ".join(str(e).split())}); '
            'decompress it, pack it again or download it again'
        ) from e
    if not samples:
        raise DataError(
            f'imagenet: {where}: got {some([*others], 5) or "nothing"}, expected files such as '
            f'{endings[0]} in it; pack it again or download it again'
        )
    return sorted(samples.values(), key=lambda s: s.name), others


def _read_tar(path: Path, is_nested: bool) -> tuple[dict[str, list[Sample]], list[str]]:
    """Return the images of each nested tar by its stem, the synset, and lines on them. A flat tar
    has the key ''."""
    with open_regular(path) as file:
        whole = (0, path.stat().st_size)
        if not is_nested:
            samples, others = _members(file, str(path), whole, ENDINGS)
            return {'': samples}, unused(path, others)
        images = {}
        tars, others = _members(file, str(path), whole, ('.tar',))
        for tar in tars:
            name = PurePosixPath(tar.name)
            part = tar.offset, tar.offset + tar.size
            where, folder = f'{path}: {name.name}', f'{name.stem}/'
            images[name.stem], more = _members(file, where, part, ENDINGS, folder)
            others += more
    return dict(sorted(images.items())), unused(path, others)


def _read_ground_truth(path: Path, names: list[str], classes: list[str]) -> list[int]:
    """Return the labels of the images in `names`, from lines "name synset", or lines "synset" in
    the order of `names`.

    The class numbers of ILSVRC2012_validation_ground_truth.txt are rejected, because their order is
    different.
    """
    try:
        lines = read_text(path, _MAX_TEXT_BYTES).splitlines()
    except (OSError, ValueError) as e:
        reason = getattr(e, 'strerror', 'not UTF-8')
        raise DataError(
            f'--ground-truth: {path}: cannot be read ({reason}); expected a text file'
        ) from e
    rows = [line.split() for line in lines if line.strip()]
    if len(rows) != len(names):
        raise DataError(
            f'--ground-truth: {path}: got {len(rows)} lines, expected {len(names)}, one per image'
        )
    if wrong := [row for row in rows if len(row) != len(rows[0]) or len(row) > 2]:
        raise DataError(
            f'--ground-truth: {path}: got the line {" ".join(wrong[0])[:60]!r}, expected "synset" '
            'on each line, or "name synset" on each'
        )
    synsets = [row[-1] for row in rows]
    if rows and len(rows[0]) == 2:
        by_name = {Path(row[0]).stem: row[-1] for row in rows}
        synsets = [by_name.get(Path(name).stem, '') for name in names]
    number = {synset: label for label, synset in enumerate(classes)}
    for name, synset in zip(names, synsets):
        if synset not in number:
            raise DataError(
                f'--ground-truth: {path}: {name}: got {synset or "no line"!r}, expected a synset '
                f'such as {classes[0]} (the class numbers of the development kit are in a '
                'different order)'
            )
    return [number[s] for s in synsets]


def imagenet(source: Path, ground_truth: Path | None, allow_partial: bool) -> Dataset:
    """Read ILSVRC2012 from its two tars or from synset folders. Labels number the synsets in order
    of name.

    Training: ILSVRC2012_img_train.tar or train/<synset>/. Validation: val/<synset>/, or
    ILSVRC2012_img_val.tar or a flat val/ with a ground truth file.
    """
    train_tar, val_tar = source / 'ILSVRC2012_img_train.tar', source / 'ILSVRC2012_img_val.tar'
    parts = by_role([source / f for f in scan(source)[0]])
    if 'train' in parts:
        images, notes = read_classes(parts['train'])
    elif train_tar.exists():
        images, notes = _read_tar(train_tar, is_nested=True)
    else:
        raise DataError(
            f'--source: {source}: got {contents(source)}, expected {train_tar.name} or '
            'train/<synset>/; for .rec files, use prepare im2rec --name imagenet'
        )
    validation, more = _validation(parts.get('validation'), val_tar, ground_truth, [*images])
    train = label(images, images)
    counts = (len(train), len(validation), len(images))
    if counts != COUNTS and not allow_partial:
        raise DataError(
            f'imagenet: got {counts[0]:,} training and {counts[1]:,} validation images of '
            f'{counts[2]} classes, expected 1,281,167 and 50,000 of 1000; complete the data or use '
            '--allow-partial'
        )
    return Dataset(
        'imagenet',
        str(source),
        classes=[*images],
        train=train,
        validation=validation,
        notes=(*notes, *more),
    )


def _validation(
    val_dir: Path | None, val_tar: Path, ground_truth: Path | None, classes: list[str]
) -> tuple[list[Sample], list[str]]:
    """Return the labelled validation images, and lines on what is used and what is not."""
    if val_dir:
        folders, flat, others = scan(val_dir)
        if folders:
            images, notes = read_classes(val_dir)
            if unknown := {*images} - {*classes}:
                shown = apart([min(unknown), *classes])[0]
                raise DataError(
                    f'--source: {val_dir}/{shown}: this class has no training images; rename or '
                    'remove it'
                )
            return label(images, classes), notes
        notes = unused(val_dir, others)
    elif val_tar.exists():
        found, notes = _read_tar(val_tar, is_nested=False)
        flat = found['']
    else:
        raise DataError(
            f'--source: {val_tar.parent}: got {contents(val_tar.parent)}, expected {val_tar.name} '
            'or val/'
        )
    if ground_truth is None:
        raise DataError(
            '--ground-truth: missing; expected a file of synsets, or images in val/<synset>/'
        )
    labels = _read_ground_truth(ground_truth, [Path(s.name).name for s in flat], classes)
    return [replace(sample, label=number) for sample, number in zip(flat, labels)], notes
