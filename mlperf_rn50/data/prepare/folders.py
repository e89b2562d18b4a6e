"""Images in class folders or in the records of im2rec, and the rules for what is a split, a class and an image."""
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.data.prepare.samples import Dataset, Sample, check_name
from mlperf_rn50.data.records import RecordFile
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import open_regular, read_bytes
from mlperf_rn50.text import some

ENDINGS = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.bmp', '.webp', '.gif', '.tif', '.tiff', '.ppm', '.pgm', '.pbm',
           '.pnm', '.jp2', '.avif')
# Folders of storage systems and programs; hidden ones begin with a dot.
_SYSTEM = {'@eadir', '@recycle', '@tmp', '#recycle', '#snapshot', '$recycle.bin', '__macosx', '__pycache__',
           'lost+found', 'system volume information'}
_ROLES = {'train': ('train', 'training'), 'validation': ('val', 'valid', 'validation', 'dev'),
          'test': ('test', 'testing')}


def scan(folder: Path) -> tuple[list[str], list[Sample], Counter[str]]:
    """Return the folders in a folder, its images (label -1), both in order of name, and numbers of other entries.

    Raise OSError for links to nothing, files that are not regular, and missing permissions.
    """
    folders, images, others, prefix = [], [], Counter[str](), '/'.join(folder.parts[-2:])
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        ending = os.path.splitext(entry.name)[1].lower()
        if entry.name.startswith('.') or entry.name.lower() in _SYSTEM:
            others[f'{entry.name}/' if entry.is_dir() else 'hidden'] += 1
            continue
        check_name(entry.path)
        status = entry.stat()
        if stat.S_ISDIR(status.st_mode) and ending not in ENDINGS:
            folders.append(entry.name)
            continue
        if not (stat.S_ISREG(status.st_mode) and os.access(entry.path, os.R_OK)):
            open_regular(entry.path).close()  # raises the reason
        if ending in ENDINGS:
            images.append(Sample(-1, f'{prefix}/{entry.name}', None, entry.path, 0, status.st_size))
        else:
            others[ending or 'without ending'] += 1
    return folders, images, others


def by_role(paths: list[Path]) -> dict[str, Path]:
    """Return the paths for train, validation and test, by names such as val or my_train.rec; refuse two for a role."""
    found = {role: [path for path in paths if path.stem.lower().rpartition('_')[2] in names]
             for role, names in _ROLES.items()}
    for role, named in found.items():
        if len(named) > 1:
            raise DataError(f'--source: got {" and ".join(map(str, named))}, expected one for {role}; move the others')
    return {role: named[0] for role, named in found.items() if named}


def unused(folder: Path, others: Counter[str]) -> list[str]:
    """Return a line on the entries of a folder that are not used, or none if there are none."""
    entries = [kind if number == 1 and kind.endswith('/') else f'{kind} ({number})' for kind, number in others.items()]
    return [f'{folder}: not used: {some(entries, 20)}'] if entries else []


def read_classes(root: Path) -> tuple[dict[str, list[Sample]], list[str]]:
    """Return the images of each class folder, and lines on what is used and what is not. Refuse empty classes."""
    names, loose, others = scan(root)
    images = {}
    for name in names:
        inner, images[name], more = scan(root / name)
        more += Counter({'folders in classes': len(inner)})
        if not images[name]:
            raise DataError(f'--source: {root / name}: got {some([*more], 5) or "nothing"}, expected images '
                            f'({" ".join(ENDINGS)}), because every folder is a class; add images, or remove it')
        others += more
    if not names:
        raise DataError(f'--source: {root}: got {len(loose)} images and no folder, expected a folder per class')
    return images, [f'{root}: {sum(map(len, images.values())):,} images of {len(images)} classes: {some(names, 10)}',
                    *unused(root, others + Counter({'images outside classes': len(loose)}))]


def label(images: dict[str, list[Sample]], classes: Iterable[str]) -> list[Sample]:
    """Return the images of these classes. A label is the position of the class."""
    return [replace(image, label=i) for i, name in enumerate(classes) for image in images.get(name, [])]


def _split(images: dict[str, list[Sample]], fraction: float) -> list[dict[str, list[Sample]]]:
    """Return the training and the validation images of each class. The latter have hashes below the fraction.

    In each class, both parts have an image. An image that is added later does not move others to the other part, except
    from or to a part that would otherwise be empty.
    """
    def place(image: Sample) -> float:
        name = os.fsencode('/'.join(image.name.split('/')[-2:]))
        return int.from_bytes(hashlib.sha256(name).digest()[:8], 'big') / 2**64
    held = set()
    for name, of_class in images.items():
        if len(of_class) == 1:
            raise DataError(f'--validation: got 1 image in {name}/, expected 2 or more in each class')
        num_held = max(1, min(sum(place(image) < fraction for image in of_class), len(of_class) - 1))
        held.update(sorted(of_class, key=place)[:num_held])
    return [{name: [image for image in of_class if (image in held) == is_held] for name, of_class in images.items()}
            for is_held in (False, True)]


def folder(source: Path, name: str, fraction: float | None = None) -> Dataset:
    """Read <source>/{train,val}/<class>/; if fraction is given, split <source>/<class>/ or <source>/train/<class>/.

    Labels number the classes in order of name.
    """
    folders, loose, others = scan(source)
    # With a fraction, a folder called train may be a class; a split contains folders.
    parts = by_role([source / f for f in folders if fraction is None or scan(source / f)[0]])
    train, val = parts.get('train'), parts.get('validation')
    if fraction is not None:
        if val:
            raise DataError(f'--validation: got {fraction:g}, but {val} exists; omit the option, or move the folder')
        images, notes = read_classes(train or source)
        train_images, val_images = _split(images, fraction)
        notes.append(f'{source}: {sum(map(len, val_images.values())):,} of these images are for validation: '
                     f'{fraction:g} of each class, selected by the SHA-256 of CLASS/FILE')
    else:
        val = val or parts.get('test')
        if not (train and val):
            raise DataError(f'--source: {source}: got {some([f"{f}/" for f in folders], 5) or "no folder"}, expected '
                            'train/ and val/ with a folder per class; to split class folders, add --validation 0.1'
                            + ('; for .rec files, use prepare im2rec' if '.rec' in others else ''))
        (train_images, notes), (val_images, more) = read_classes(train), read_classes(val)
        notes += more
        if single := sorted({*train_images} ^ {*val_images}):
            raise DataError(f'--source: class {single[0]} is only in {train if single[0] in train_images else val}, '
                            'expected it in both splits; add or remove its images')
    if train:
        rest = Counter(f'{f}/' for f in folders if source / f not in (train, val))
        notes += unused(source, rest + others + Counter({'images': len(loose)}))
    return Dataset(name, str(source), [*train_images], label(train_images, train_images),
                   label(val_images, train_images), tuple(notes))


def _record_samples(rec: Path) -> list[Sample]:
    """Return a sample for each record of a .rec, in the order of its .idx. Names are those in the .lst, if any."""
    lst, idx = rec.with_suffix('.lst'), rec.with_suffix('.idx')
    if not idx.exists():
        raise DataError(f'--source: {idx}: missing; create it with rec2idx.py of MXNet')
    lines = [check_name(line).split('\t') for line in os.fsdecode(read_bytes(lst)).splitlines()] if lst.exists() else []
    names, records, samples = {line[0]: line[-1] for line in lines}, RecordFile(rec), []
    for position in range(len(records)):
        record, (_, start, length) = records.read(position), records.place(position)
        name = names.get(str(record.sample_id), f'{rec.name}, record {position}')
        samples.append(Sample(record.label, name, None, str(rec), start, length, is_record=True))
    return samples


def im2rec(source: Path, name: str) -> Dataset:
    """Return the images in the .rec files of im2rec, which stay where they are. Classes are named by their labels."""
    found = by_role(sorted(source.glob('*.rec')))
    train, val = found.get('train'), found.get('validation') or found.get('test')
    if not (train and val):
        raise DataError(f'--source: {source}: got {some([p.name for p in found.values()], 5) or "no .rec"}, expected '
                        'train.rec and val.rec, each with its .idx')
    recs = {'train': train, 'validation': val}
    samples = {split: _record_samples(rec) for split, rec in recs.items()}
    known = {*range(len({s.label for s in samples['train']}))}
    for split, rec in recs.items():
        if strange := {s.label for s in samples[split]} - known:
            raise DataError(f'--source: {rec}: got label {min(strange)}, expected 0 to {len(known) - 1} for the '
                            f'{len(known)} labels of the training images; correct the .lst and run im2rec again')
    notes = tuple(f'{rec}: {len(samples[split]):,} images, labels 0 to {len(known) - 1}' for split, rec in recs.items())
    return Dataset(name, str(source), [*map(str, known)], samples['train'], samples['validation'], notes, recs)
