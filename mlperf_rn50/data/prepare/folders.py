"""Images in class folders or in the records of im2rec, and the rules for what is a split, a class
and an image."""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.data.prepare.pack import PARTS
from mlperf_rn50.data.prepare.samples import Dataset, Sample, check_name
from mlperf_rn50.data.recordio import MANIFEST_NAME, parse_index, parse_record
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import open_regular, read_text
from mlperf_rn50.text import apart, plural, some

ENDINGS = tuple(
    '.jpg .jpeg .jpe .jfif .png .bmp .webp .gif .tif .tiff .ppm .pgm .pbm .pnm .jp2 .avif'.split()
)
_MAX_LIST_BYTES = 1 << 32
_JOIN = (
    'join all parts (those of im2rec --chunks with cat, then create the .idx with rec2idx.py '
    'of MXNet)'
)
# Folders of storage systems and programs; hidden ones begin with a dot.
_SYSTEM = {
    *'@eadir @recycle @tmp #recycle #snapshot $recycle.bin __macosx __pycache__ lost+found'.split(),
    'system volume information',
}
_ROLES = {
    'train': ('train', 'training'),
    'validation': ('val', 'valid', 'validation', 'dev'),
    'test': ('test', 'testing'),
}


def is_hidden(name: str) -> bool:
    """Return whether an entry of a folder or archive is hidden, or that of a storage system or
    program."""
    return name.startswith('.') or name.lower() in _SYSTEM


def scan(folder: Path) -> tuple[list[str], list[Sample], Counter[str]]:
    """Return the folders in a folder, its images (label -1), both in order of name, and numbers of
    other entries.

    Raise OSError for links to nothing, files that are not regular, and missing permissions.
    """
    folders, images, others, prefix = [], [], Counter[str](), '/'.join(folder.parts[-2:])
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        ending = os.path.splitext(entry.name)[1].lower()
        if is_hidden(entry.name):
            others[f'{entry.name}/' if entry.is_dir() else 'hidden'] += 1
            continue
        check_name(entry.path)
        status = entry.stat()
        if stat.S_ISDIR(status.st_mode) and _is_output(Path(entry.path)):
            others[f'{entry.name}/'] += 1
            continue
        if stat.S_ISDIR(status.st_mode) and ending not in ENDINGS:
            folders.append(entry.name)
            continue
        if not (stat.S_ISREG(status.st_mode) and os.access(entry.path, os.R_OK)):
            open_regular(entry.path).close()  # raises the reason
        if ending in ENDINGS:
            name = f'{prefix}/{entry.name}'
            images.append(Sample(-1, name, path=entry.path, size=status.st_size))
        else:
            others[ending or 'without ending'] += 1
    return folders, images, others


def _is_output(folder: Path) -> bool:
    """Return whether a folder has what prepare writes, complete or not."""
    with suppress(PermissionError):  # which is refused where the folder is used
        return (folder / PARTS).is_dir() or {MANIFEST_NAME, 'train.rec'} <= {*os.listdir(folder)}
    return False


def by_role(paths: list[Path]) -> dict[str, Path]:
    """Return the paths for train, validation and test, by names such as val or my_train.rec; refuse
    two for a role.

    A link to another path for the same role is omitted, such as those that prepare im2rec adds to a
    folder of records.
    """
    found = {
        role: [path for path in paths if path.stem.lower().rpartition('_')[2] in names]
        for role, names in _ROLES.items()
    }
    for role, named in found.items():
        if len({*map(os.path.realpath, named)}) > 1:
            raise DataError(
                f'--source: got {" and ".join(apart(named))}, expected one for {role}; {_JOIN}, '
                'or move those of other data sets'
            )
    return {role: min(named, key=Path.is_symlink) for role, named in found.items() if named}


def _entries(others: Counter[str]) -> list[str]:
    return [
        kind if number == 1 and kind.endswith('/') else f'{kind} ({number})'
        for kind, number in others.items()
    ]


def unused(path: Path, others: Counter[str]) -> list[str]:
    """Return a line on the entries of a folder or archive that are not used, or none if there are
    none."""
    return [f'{path}: not used: {some(_entries(others), 20)}'] if others else []


def contents(folder: Path) -> str:
    """Describe a folder for a refusal: its folders, images, and other files by ending, also those
    in its folders."""

    def shown(name: str) -> str:
        *used, rest = scan(folder / name)
        return f'{name}/ with {some(_entries(rest), 5)}' if rest and not any(used) else f'{name}/'

    folders, images, others = scan(folder)
    found = [
        f'{plural(len(images), "image")} such as {Path(i.path).name}' for i in images[:1]
    ] + _entries(others)
    return some([*map(shown, folders[:5]), *found, *folders[5:]], 5 + len(found)) or 'nothing'


def read_classes(root: Path) -> tuple[dict[str, list[Sample]], list[str]]:
    """Return the images of each class folder, and lines on what is used and what is not. Refuse
    empty classes."""
    names, loose, others = scan(root)
    images = {}
    for name in names:
        inner, images[name], more = scan(root / name)
        more += Counter({'folders in classes': len(inner)})
        if not images[name]:
            raise DataError(
                f'--source: {root / name}: got {contents(root / name)}, expected images '
                f'({" ".join(ENDINGS)}), because every folder is a class; add images, or remove it'
            )
        others += more
    if not names:
        advice = 'put the images of each class into a folder'
        if [*root.glob('n[0-9]*.tar')]:
            advice = (
                'unpack each archive of a synset: '
                'mkdir n01440764 && tar -xf n01440764.tar -C n01440764'
            )
        raise DataError(
            f'--source: {root}: got {contents(root)}, expected a folder per class; {advice}'
        )
    return images, [
        f'{root}: {sum(map(len, images.values())):,} images of {len(images)} classes: '
        f'{some(names, 10)}',
        *unused(root, others + Counter({'images outside classes': len(loose)})),
    ]


def label(images: dict[str, list[Sample]], classes: Iterable[str]) -> list[Sample]:
    """Return the images of these classes. A label is the position of the class."""
    return [
        replace(image, label=i) for i, name in enumerate(classes) for image in images.get(name, [])
    ]


def _split(images: dict[str, list[Sample]], fraction: float) -> list[dict[str, list[Sample]]]:
    """Return the training and the validation images of each class. The latter have hashes below the
    fraction.

    In each class, both parts have an image. An image that is added later does not move others to
    the other part, except from or to a part that would otherwise be empty.
    """

    def share_of(image: Sample) -> float:
        name = os.fsencode('/'.join(image.name.split('/')[-2:]))
        return int.from_bytes(hashlib.sha256(name).digest()[:8], 'big') / 2**64

    parts: list[dict[str, list[Sample]]] = [{}, {}]
    for name, of_class in images.items():
        if len(of_class) == 1:
            raise DataError(
                f'--validation: got 1 image in {name}/, expected 2 or more in each class'
            )
        num_below = sum(share_of(image) < fraction for image in of_class)
        num_held = max(1, min(num_below, len(of_class) - 1))
        held = {*sorted(of_class, key=share_of)[:num_held]}
        for part, is_held in zip(parts, (False, True)):
            part[name] = [image for image in of_class if (image in held) == is_held]
    return parts


def folder(source: Path, name: str, fraction: float | None = None) -> Dataset:
    """Read <source>/{train,val}/<class>/; if fraction is given, split <source>/<class>/ or
    <source>/train/<class>/.

    Labels number the classes in order of name.
    """
    folders, loose, others = scan(source)
    # With a fraction, a folder called train may be a class; a split contains folders.
    parts = by_role([source / f for f in folders if fraction is None or scan(source / f)[0]])
    train, val = parts.get('train'), parts.get('validation')
    if fraction is not None:
        if val:
            raise DataError(
                f'--validation: got {fraction:g}, but {val} exists; omit the option, or move the '
                'folder'
            )
        images, notes = read_classes(train or source)
        train_images, val_images = _split(images, fraction)
        notes.append(
            f'{source}: {sum(map(len, val_images.values())):,} of these images are for validation: '
            f'{fraction:g} of each class, selected by the SHA-256 of CLASS/FILE'
        )
    else:
        val = val or parts.get('test')
        if not (train and val):
            hint = '; for .rec files, use prepare im2rec' if '.rec' in others else ''
            raise DataError(
                f'--source: {source}: got {contents(source)}, expected train/ and val/ with a '
                f'folder per class; to split class folders, add --validation 0.1{hint}'
            )
        (train_images, notes), (val_images, more) = read_classes(train), read_classes(val)
        notes += more
        if single := sorted({*train_images} ^ {*val_images}):
            only_in = train if single[0] in train_images else val
            raise DataError(
                f'--source: class {apart(single)[0]} is only in {only_in}, expected it in both '
                'splits; add, rename or remove it'
            )
    if train:
        rest = Counter(f'{f}/' for f in folders if source / f not in (train, val))
        notes += unused(source, rest + others + Counter({'images': len(loose)}))
    return Dataset(
        name,
        str(source),
        classes=[*train_images],
        train=label(train_images, train_images),
        validation=label(val_images, train_images),
        notes=tuple(notes),
    )


def _listed(path: Path) -> dict[int, str]:
    """Return the names of the images in an .lst by their numbers; none if it is missing."""
    try:
        lines = read_text(path, _MAX_LIST_BYTES).split('\n') if path.exists() else []
    except ValueError as e:
        raise DataError(f'--source: {path}: not UTF-8; convert it, or remove this file') from e
    rows = [line.strip().split('\t') for line in lines]
    return {
        int(row[0]): row[-1] for row in rows if len(row) > 2 and re.fullmatch(r'\d{1,19}', row[0])
    }


def _record_samples(rec: Path) -> tuple[list[Sample], list[str]]:
    """Return a sample for each record of a .rec in the order of its .idx, named as in its .lst, and
    lines on them.

    Every record fills its place in the index, so no image between or after those of the index is
    lost.
    """
    lst, idx = rec.with_suffix('.lst'), rec.with_suffix('.idx')
    if not idx.exists():
        raise DataError(f'--source: {idx}: missing; create it with rec2idx.py of MXNet')
    names, samples, found = _listed(lst), [], set[int]()
    with open_regular(rec) as f:
        index = parse_index(idx, os.fstat(f.fileno()).st_size)
        for position, (start, length) in enumerate(index.T.tolist()):
            where = f'{rec.name}, record {position}'
            record = parse_record(os.pread(f.fileno(), length, start), f'{rec.parent}/{where}')
            name = names.get(record.sample_id, where)
            location = {'path': str(rec), 'offset': start, 'size': length}
            samples.append(Sample(record.label, name, **location, is_record=True))
            found.add(record.sample_id)
    if lst.exists() and (unlisted := found - names.keys()):
        raise DataError(
            f'--source: {lst}: got no line for number {min(unlisted)}, which is in {rec.name}, '
            'expected one per image; restore the lines, or remove this file'
        )
    lost = len(names.keys() - found)
    notes = [f'{lst}: {lost:,} of its {len(names):,} images are not in {rec.name}'] if lost else []
    return samples, notes


def im2rec(source: Path, name: str) -> Dataset:
    """Return the images in the .rec files of im2rec, which stay where they are. Classes are named
    by their labels."""
    files = sorted(path for path in source.glob('*.rec') if not is_hidden(path.name))
    found = by_role(files)
    train, val = found.get('train'), found.get('validation') or found.get('test')
    if not (train and val):
        raise DataError(
            f'--source: {source}: got {some([p.name for p in files], 5) or contents(source)}, '
            f'expected train.rec and val.rec, each with its .idx; {_JOIN}'
        )
    recs = {'train': train, 'validation': val}
    samples, lines = {}, list[str]()
    for split, rec in recs.items():
        check_name(rec.name)
        samples[split], more = _record_samples(rec)
        lines += more
    known = {*range(len({s.label for s in samples['train']}))}
    for split, rec in recs.items():
        if strange := {s.label for s in samples[split]} - known:
            raise DataError(
                f'--source: {rec}: got label {min(strange)}, expected 0 to {len(known) - 1} for '
                f'the {len(known)} labels of the training images; correct the .lst and run im2rec '
                'again'
            )
    notes = [
        f'{rec}: {len(samples[split]):,} images, labels 0 to {len(known) - 1}'
        for split, rec in recs.items()
    ]
    return Dataset(
        name,
        str(source),
        classes=[*map(str, known)],
        **samples,
        notes=(*notes, *lines),
        recs=recs,
    )
