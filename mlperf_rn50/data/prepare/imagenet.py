"""ImageNet (ILSVRC2012) from its two tars, read in place, or from synset folders."""
import tarfile
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.data.prepare.folders import by_role, label, read_classes, scan, unused
from mlperf_rn50.data.prepare.samples import TAR_ERRORS, Dataset, Sample, check_name
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import open_regular

COUNTS = (1_281_167, 50_000, 1000)  # numbers of training images, validation images and classes


def _members(path: Path, tar: tarfile.TarFile, start: int = 0) -> list[Sample]:
    """Return the unlabelled images of a tar in order of name. start: position of the tar in the file, in bytes."""
    samples = [Sample(-1, check_name(f'{path.name}/{Path(member.name).name}'), None, str(path),
                      start + member.offset_data, member.size) for member in filter(tarfile.TarInfo.isfile, tar)]
    return sorted(samples, key=lambda s: s.name)


def _read_tar(path: Path, is_nested: bool) -> dict[str, list[Sample]]:
    """Return the images of each nested tar by its stem, the synset, in order of name. A flat tar has the key ''."""
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode='r:') as outer:
            if not is_nested:
                return {'': _members(path, outer)}
            images = {}
            for member in filter(tarfile.TarInfo.isfile, outer):
                with tarfile.open(fileobj=outer.extractfile(member), mode='r:') as inner:
                    images[Path(member.name).stem] = _members(path, inner, member.offset_data)
            return dict(sorted(images.items()))
    except TAR_ERRORS as e:
        raise DataError(f'imagenet: {path}: not a readable, uncompressed tar ({" ".join(str(e).split())}); decompress '
                        'it or download it again') from e


def _read_ground_truth(path: Path, names: list[str], classes: list[str]) -> list[int]:
    """Return the labels of the images in `names`, from lines "name synset", or lines "synset" in the order of `names`.

    The class numbers of ILSVRC2012_validation_ground_truth.txt are rejected, because their order is different.
    """
    try:
        rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f'--ground-truth: {path}: cannot be read; expected a text file') from e
    if len(rows) != len(names):
        raise DataError(f'--ground-truth: {path}: got {len(rows)} lines, expected {len(names)}, one per image')
    if all(len(row) > 1 for row in rows):
        by_name = {Path(row[0]).stem: row[-1] for row in rows}
        synsets = [by_name.get(Path(name).stem, '') for name in names]
    else:
        synsets = [row[-1] for row in rows]
    number = {synset: label for label, synset in enumerate(classes)}
    for name, synset in zip(names, synsets):
        if synset not in number:
            raise DataError(f'--ground-truth: {path}: {name}: got {synset or "no line"!r}, expected a synset such as '
                            f'{classes[0]} (the class numbers of the development kit are in a different order)')
    return [number[s] for s in synsets]


def imagenet(source: Path, ground_truth: Path | None, allow_partial: bool) -> Dataset:
    """Read ILSVRC2012 from its two tars or from synset folders. Labels number the synsets in order of name.

    Training: ILSVRC2012_img_train.tar or train/<synset>/. Validation: val/<synset>/, or ILSVRC2012_img_val.tar or a
    flat val/ with a ground truth file.
    """
    train_tar, val_tar = source / 'ILSVRC2012_img_train.tar', source / 'ILSVRC2012_img_val.tar'
    parts = by_role([source / f for f in scan(source)[0]])
    if 'train' in parts:
        images, notes = read_classes(parts['train'])
    elif train_tar.exists():
        images, notes = _read_tar(train_tar, is_nested=True), []
    else:
        raise DataError(f'--source: {source}: expected {train_tar.name} or train/<synset>/ in it; '
                        'for .rec files, use prepare im2rec --name imagenet')
    validation, more = _validation(parts.get('validation'), val_tar, ground_truth, [*images])
    result = Dataset('imagenet', str(source), [*images], label(images, images), validation, (*notes, *more))
    counts = (len(result.train), len(validation), len(images))
    if counts != COUNTS and not allow_partial:
        raise DataError(f'imagenet: got {counts[0]:,} training and {counts[1]:,} validation images of {counts[2]} '
                        'classes, expected 1,281,167 and 50,000 of 1000; complete the data or use --allow-partial')
    return result


def _validation(val_dir: Path | None, val_tar: Path, ground_truth: Path | None,
                classes: list[str]) -> tuple[list[Sample], list[str]]:
    """Return the labelled validation images, and lines on what is used and what is not."""
    if val_dir:
        folders, flat, others = scan(val_dir)
        if folders:
            images, notes = read_classes(val_dir)
            if unknown := {*images} - {*classes}:
                raise DataError(f'--source: {val_dir / min(unknown)}: this class has no training images; remove it')
            return label(images, classes), notes
        notes = unused(val_dir, others)
    elif val_tar.exists():
        flat, notes = _read_tar(val_tar, is_nested=False)[''], []
    else:
        raise DataError(f'--source: {val_tar.parent}: expected {val_tar.name} or val/ in it')
    if ground_truth is None:
        raise DataError('--ground-truth: missing; expected a file of synsets, or images in val/<synset>/')
    labels = _read_ground_truth(ground_truth, [Path(s.name).name for s in flat], classes)
    return [replace(sample, label=number) for sample, number in zip(flat, labels)], notes
