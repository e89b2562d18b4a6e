"""Packing of images into RecordIO: <out>/{train,validation}.{rec,idx,index.npy,crc.npy,names.txt}
and manifest.json.

Threads check and convert the images, PART_SIZE at a time. An interrupted preparation resumes after
the last whole part whose images have the same contents as before. No file is replaced that prepare
did not write.
"""

import filecmp
import hashlib
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain, count, repeat
from pathlib import Path
from typing import BinaryIO

import msgspec
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from mlperf_rn50.data.prepare.samples import Dataset, Sample
from mlperf_rn50.data.recordio import (
    CHECKSUMS,
    INDEX,
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    NAMES,
    pack_record,
    parse_record,
)
from mlperf_rn50.data.verify import describe_records, dump_manifest
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import (
    make_folder,
    no_link,
    read_bytes,
    refuse_existing,
    sync,
    write_atomically,
)
from mlperf_rn50.runfolder.jsonl import decode
from mlperf_rn50.system.out_of_memory import lack_of
from mlperf_rn50.text import plural, some

PART_SIZE = 1000
PARTS = '.parts'
TRAIN_YAML = 'train.yaml'
_DAMAGED = 'damaged.txt'
# Files in --out: those that are published together, the manifest last; the list of damaged images;
# and, for images of the user, a configuration.
_ENDINGS = ('.rec', '.idx', INDEX, CHECKSUMS, NAMES)
_DATA = (*(split + end for split in ('train', 'validation') for end in _ENDINGS), MANIFEST_NAME)
OUTPUTS = (*_DATA, _DAMAGED, TRAIN_YAML)
_IN_PARTS = re.compile(r'[0-9a-f]{64}(/\.?(train|validation|manifest|damaged)[_.].+)?')


class _Part(msgspec.Struct):
    """Names and CRC-32 of the records of a part, sizes of those written, damaged images with the
    reasons, sources."""

    names: list[str] = []
    checksums: list[int] = []
    sizes: list[int] = []
    damaged: list[tuple[str, str]] = []
    sources: list[int] = []  # CRC-32 of each image as read, also of damaged ones


def make_record(
    sample: Sample, sample_id: int, encode: Callable[..., bytes]
) -> tuple[int, bytes | str]:
    """Return the CRC-32 of an image as read, and the record to store, or the reason why the image
    is damaged."""
    encoded = sample.read()
    source = zlib.crc32(encoded)
    try:
        if not sample.is_record:
            return source, pack_record(sample.label, sample_id, encode(encoded))
        image = parse_record(encoded, sample.name).image.tobytes()
        if encode(image, is_fixed=True) != image:
            raise ValueError('training cannot decode it as it is')
        return source, encoded
    except DataError:
        raise
    except Exception as e:
        if why := lack_of(e, 'use fewer --workers'):
            raise DataError(f'{sample.name}: {why}') from e
        reason = ' '.join(str(e).split()).partition(' <_io')[0]  # without the name of a buffer
        return source, f'{type(e).__name__}: {reason[:120]}'


def _make_part(
    group: list[Sample], made: Iterable[tuple[int, bytes | str]], rec: BinaryIO, bar: tqdm
) -> _Part:
    """Append the records that make_record has made of a group of images to a .rec. Return their
    part."""
    part = _Part()
    for sample, (source, record) in zip(group, made):
        bar.update()
        part.sources.append(source)
        if isinstance(record, str):
            part.damaged.append((sample.name, record))
            continue
        part.names.append(sample.name)
        part.checksums.append(zlib.crc32(record))
        if not sample.is_record:
            part.sizes.append(len(record))
            rec.write(record)
    sync(rec)
    return part


def _is_stored(part: _Part, rec: BinaryIO, group: list[Sample]) -> bool:
    """Return whether a .rec continues with the records of a part. They are not stored again if they
    are in others."""
    stored = [zlib.crc32(rec.read(size)) for size in part.sizes]
    return stored == ([] if group[0].is_record else part.checksums)


def _stays_damaged(
    part: _Part, pool: Executor, group: list[Sample], encode: Callable[..., bytes]
) -> bool:
    """Return whether the damaged images of a part still cannot be used, for example because of a
    library that was missing."""
    names = {name for name, _ in part.damaged}
    damaged = [sample for sample in group if sample.name in names]
    again = pool.map(make_record, damaged, repeat(0), repeat(encode))
    return all(isinstance(record, str) for _, record in again)


def _write_parts(
    rec_path: Path, samples: list[Sample], encode: Callable[..., bytes], num_workers: int
) -> _Part:
    """Append the missing parts of a split to its .rec, and a JSON file beside it for each. Return
    all parts as one."""
    parts = list[_Part]()
    size, is_kept = 0, True
    with (
        open(rec_path, 'a+b', opener=no_link) as rec,
        ThreadPoolExecutor(num_workers) as pool,
        tqdm(total=len(samples), desc=f'prepare {rec_path.stem}', unit='img', disable=None) as bar,
    ):
        rec.seek(0)
        for start in range(0, len(samples), PART_SIZE):
            path = rec_path.with_name(f'{rec_path.stem}_{len(parts):05d}.json')
            group = samples[start : start + PART_SIZE]
            part = decode(read_bytes(path), _Part) if is_kept and path.exists() else None
            is_kept = bool(
                part
                and _is_stored(part, rec, group)
                and part.sources == [*pool.map(Sample.checksum, group)]
                and _stays_damaged(part, pool, group, encode)
            )
            if part and is_kept:
                bar.update(len(group))
            else:
                rec.seek(size)
                rec.truncate()
                made = pool.map(make_record, group, count(start), repeat(encode))
                part = _make_part(group, made, rec, bar)
                write_atomically(path, msgspec.json.encode(part))
            parts.append(part)
            size += sum(part.sizes)
        rec.truncate(size)
    columns = zip(*map(msgspec.structs.astuple, parts))
    return _Part(*(list(chain.from_iterable(lists)) for lists in columns))


def _links(dataset: Dataset, out: Path) -> dict[Path, Path]:
    """Return the links to the records of im2rec and their indexes, and where they lead."""
    return {
        out / f'{split}{suffix}': rec.with_suffix(suffix)
        for split, rec in dataset.recs.items()
        for suffix in ('.rec', '.idx')
    }


def _publish(path: Path, out: Path) -> None:
    """Add a finished part of the data to --out. Its other name in the parts marks it as written by
    prepare."""
    refuse_existing([out / path.name])
    try:
        os.link(path, out / path.name)
    except OSError:  # a file system without hard links
        if path.name == _DAMAGED:
            write_atomically(out / path.name, read_bytes(path))
        else:
            path.rename(out / path.name)


def claim(out: Path, dataset: Dataset, has_config: bool) -> None:
    """Remove what a stopped preparation has published. Raise ConfigError for a file that prepare
    did not write.

    has_config: whether train.yaml is to be written too.
    """
    parts = out / PARTS
    foreign = [parts]
    if parts.is_dir() and not parts.is_symlink():
        inner = [*parts.glob('*'), *parts.glob('*/*')]
        foreign = [p for p in inner if not _is_part(p, parts)]
    refuse_existing(foreign)
    for part in parts.glob('*/*'):
        path = out / part.name
        if path.is_file() and not path.is_symlink() and _is_same(path, part):
            path.unlink()
    links = _links(dataset, out)
    paths = [out / name for name in OUTPUTS if has_config or name != TRAIN_YAML]
    refuse_existing(p for p in paths if not (p in links and p.exists() and p.samefile(links[p])))


def _is_same(path: Path, part: Path) -> bool:
    """Return whether a file is a published part, or its copy."""
    return path.samefile(part) or part.name == _DAMAGED and filecmp.cmp(path, part, shallow=False)


def _is_part(path: Path, parts: Path) -> bool:
    """Return whether prepare may have written a path in the folder of parts: a folder there, or a
    file in one."""
    is_named = _IN_PARTS.fullmatch(str(path.relative_to(parts)))
    is_folder = path.parent == parts
    return bool(is_named) and not path.is_symlink() and path.is_dir() == is_folder


def checksums_of(samples: Sequence[Sample], num_workers: int) -> Iterable[int]:
    """Return the CRC-32 of each image as read. Threads read PART_SIZE images at a time."""
    blocks = [samples[k : k + PART_SIZE] for k in range(0, len(samples), PART_SIZE)]

    def read(block: Sequence[Sample]) -> list[int]:
        return [sample.checksum() for sample in block]

    return chain.from_iterable(
        thread_map(read, blocks, max_workers=num_workers, desc='compare', disable=None)
    )


def digest_of_sources(
    dataset: Dataset, resize_shorter: int | None, checksums: Iterable[int]
) -> str:
    """Return a SHA-256 of what determines the records: class, name and CRC-32 of each image, and
    the size."""
    samples = chain(dataset.train, dataset.validation)
    images = [(s.label, s.name, checksum) for s, checksum in zip(samples, checksums)]
    return hashlib.sha256(repr((dataset.classes, resize_shorter, images)).encode()).hexdigest()


def _describe_split(part: _Part, made: Path, rec: Path | None) -> dict:
    """Write the files beside `made`, a .rec of the parts; rec: that of im2rec, which has an .idx.
    Return the manifest entry of the split."""
    if rec is None:
        starts = [0, *accumulate(part.sizes)][:-1]
        lines = ''.join(f'{key}\t{start}\n' for key, start in enumerate(starts))
        write_atomically(made.with_suffix('.idx'), lines)
    return describe_records(rec or made, made, part.names, part.checksums)


def _publish_all(folder: Path, out: Path, links: dict[Path, Path]) -> None:
    """Add links and all files of the data to --out, the manifest last."""
    for link, target in links.items():
        (folder / link.name).unlink(missing_ok=True)  # an empty .rec
        if not os.path.lexists(link):
            link.symlink_to(os.path.relpath(target.resolve(), out.resolve()))
    for path in (folder / name for name in _DATA):
        if path.exists():
            _publish(path, out)
    shutil.rmtree(folder.parent)


def _check_classes(dataset: Dataset, parts: dict[str, _Part]) -> None:
    """Raise DataError for a class of which all images in a split are damaged."""
    for split, samples in (('train', dataset.train), ('validation', dataset.validation)):
        damaged = {name for name, _ in parts[split].damaged}
        kept = {s.label for s in samples if s.name not in damaged}
        if empty := sorted({s.label for s in samples} - kept):
            names = some([dataset.classes[label] for label in empty], 5)
            raise DataError(
                f'{split}: got only damaged images of {names}, expected one or more of each class; '
                'replace them'
            )


def pack(
    dataset: Dataset,
    out: Path,
    num_workers: int = 1,
    resize_shorter: int | None = None,
    skip_damaged: bool = False,
    state: str = '',
) -> dict:
    """Pack a data set. Return the manifest, written last. Raise DataError for damaged images unless
    skip_damaged.

    state: of the files of the source, for the manifest.
    """
    from mlperf_rn50.data.images import MAX_STORED_PIXELS, DecoderTest, encode_image

    # The folder of the parts depends on the input, so that those of a different one are removed.
    samples = {'train': dataset.train, 'validation': dataset.validation}
    contents = [[*dataset.recs], *((s.label, s.name, s.size) for s in chain(*samples.values()))]
    given = repr((PART_SIZE, resize_shorter, contents))
    folder = out / PARTS / hashlib.sha256(given.encode()).hexdigest()
    if folder.parent.exists() and not folder.exists():
        shutil.rmtree(folder.parent)
    make_folder(folder)

    # Pack the images.
    encode = partial(
        encode_image,
        test=DecoderTest(),
        resize_shorter=resize_shorter,
        max_pixels=MAX_STORED_PIXELS,
    )
    parts = {}
    with warnings.catch_warnings():
        # Pillow warns of a large image and rejects one of twice that size
        warnings.simplefilter('ignore')
        for name, of_split in samples.items():
            parts[name] = _write_parts(folder / f'{name}.rec', of_split, encode, num_workers)
    damaged = [image for part in parts.values() for image in part.damaged]
    if damaged and not skip_damaged:
        listed = folder / _DAMAGED
        write_atomically(listed, ''.join(f'{image}\t{why}\n' for image, why in damaged))
        _publish(listed, out)
        first = some([f'{image} ({why})' for image, why in damaged], 5)
        those = f'those listed in {out / _DAMAGED}'
        advice = f'replace {those} or skip them with --skip-corrupt'
        if dataset.recs:
            advice = f'run im2rec again without {those}'
        raise DataError(f'{plural(len(damaged), "image")} cannot be decoded: {first}; {advice}')

    _check_classes(dataset, parts)

    # Describe and publish them.
    sources = chain.from_iterable(part.sources for part in parts.values())
    manifest = {
        'format': MANIFEST_FORMAT,
        'dataset': dataset.name,
        'source': dataset.source,
        'resize_shorter': resize_shorter,
        'classes': dataset.classes,
        'splits': {
            name: _describe_split(part, folder / f'{name}.rec', dataset.recs.get(name))
            for name, part in parts.items()
        },
        'skipped': [name for name, _ in damaged],
        'notes': dataset.notes,
        'source_state': state,
        'source_sha256': digest_of_sources(dataset, resize_shorter, sources),
    }
    dump_manifest(folder, manifest)
    _publish_all(folder, out, _links(dataset, out))
    return manifest
