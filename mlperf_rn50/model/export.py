"""A trained network in the formats of others: ONNX, and Gluon's symbol and parameters; checked as it is written."""
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from mlperf_rn50.errors import RunFailed, UserError
from mlperf_rn50.files import dump_json, writing_folder

# Of the largest logit of an image; float32 sums in another order differ by some 1e-6.
LIMIT = 1e-4
INPUT = 'data'


@dataclass(frozen=True)
class Difference:
    """How far two networks are apart: the largest difference of two logits, and as a share of the image's largest."""

    absolute: float
    relative: float
    num_images: int


def difference(wanted: np.ndarray, got: np.ndarray) -> Difference:
    """How far logits are from those of the network, both (images, classes)."""
    if wanted.shape != got.shape:
        return Difference(np.nan, np.nan, len(wanted))
    apart = np.abs(wanted.astype(np.float64) - got).max(axis=1)
    return Difference(float(apart.max()), float((apart / np.abs(wanted).max(axis=1)).max()), len(wanted))


def export(net: HybridBlock, images: mx.nd.NDArray, out: Path, stem: str, output_format: str,
           facts: dict) -> tuple[list[Path], Difference]:
    """Writes a network, its description and nothing else; all of it or nothing.

    Args:
        net: images to logits, float32 on the CPU, of ordinary operators.
        images: to check it with, float32, (batch, 3, side, side).
        facts: what a user has to know, for the description.

    Returns:
        The files, and how far what was written is from the network.

    Raises:
        UserError: one of the files is there, or they cannot be written.
        RunFailed: what was written computes something else.
    """
    names = [f'{stem}.onnx'] if output_format == 'onnx' else [f'{stem}-symbol.json', f'{stem}-0000.params']
    names.append(f'{stem}.{output_format}.json')
    _refuse_existing(out, names)
    wanted = net(images).asnumpy()
    with writing_folder(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='.export.', dir=out) as scratch:
            written = Path(scratch) / stem
            net.export(str(written))
            if output_format == 'onnx':
                _to_onnx(written, tuple(images.shape[1:]))
            found = difference(wanted, (_run_onnx if output_format == 'onnx' else _run_gluon)(written, images))
            if not found.relative <= LIMIT:  # also NaN
                raise RunFailed(f'{out / names[0]}: not written: what was exported differs from the network by '
                                f'{found.absolute:.3g}, {found.relative:.3g} of the largest logit, expected at most '
                                f'{LIMIT:g}')
            dump_json(Path(scratch) / names[-1], {**facts, 'format': output_format, 'files': names[:-1], 'check': {
                'images': found.num_images, 'max_absolute_difference': found.absolute,
                'max_relative_difference': found.relative}})
            _refuse_existing(out, names)
            for name in names:
                (Path(scratch) / name).rename(out / name)
    return [out / name for name in names], found


def _refuse_existing(out: Path, names: list[str]) -> None:
    for name in names:
        if (out / name).exists():
            raise UserError(f'{out / name}: exists already; remove it, or choose another folder with --out')


def _run_gluon(stem: Path, images: mx.nd.NDArray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that it does not know the input's type
        net = mx.gluon.SymbolBlock.imports(f'{stem}-symbol.json', [INPUT], f'{stem}-0000.params')
    return net(images).asnumpy()


def _to_onnx(stem: Path, shape: tuple[int, ...]) -> None:
    """Gluon's files as ONNX, by MXNet's own exporter; the number of images stays open."""
    files = Path(f'{stem}-symbol.json'), Path(f'{stem}-0000.params')
    mx.onnx.export_model(*map(str, files), [(1, *shape)], [np.float32], f'{stem}.onnx', dynamic=True,
                         dynamic_input_shapes=[('batch', *shape)])
    for path in files:
        path.unlink()


def _run_onnx(stem: Path, images: mx.nd.NDArray) -> np.ndarray:
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(f'{stem}.onnx', options, providers=['CPUExecutionProvider'])
    return session.run(None, {INPUT: images.asnumpy()})[0]
