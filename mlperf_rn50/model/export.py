"""Export of a trained network to ONNX, or to Gluon's symbol and parameter files, with a check of
the written files."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock
from mxnet.ndarray import NDArray

from mlperf_rn50.errors import RunFailed
from mlperf_rn50.files import dump_json, refuse_existing
from mlperf_rn50.runfolder.outputs import new_files

# maximum difference, as a fraction of the largest logit; another order of float32 sums causes about
# 1e-6
LIMIT = 1e-4
INPUT = 'data'


@dataclass(frozen=True)
class Difference:
    """Largest difference between logits: absolute, and as a fraction of the largest absolute logit
    of the image."""

    absolute: float
    relative: float
    num_images: int


def difference(expected: np.ndarray, got: np.ndarray) -> Difference:
    """Compare the logits of a network (expected) and its export (got): (images, classes). Different
    shapes give NaN."""
    if expected.shape != got.shape:
        return Difference(np.nan, np.nan, len(expected))
    errors = np.abs(expected.astype(np.float64) - got).max(axis=1)
    relative = errors / np.abs(expected).max(axis=1)
    return Difference(float(errors.max()), float(relative.max()), len(expected))


def export(
    net: HybridBlock, images: NDArray, out: Path, stem: str, output_format: str, facts: dict
) -> tuple[list[Path], Difference]:
    """Write a network and its description, all files or none. Return their paths and the measured
    difference.

    Raise ConfigError if a file exists or cannot be written, RunFailed if the exported logits
    differ. net is float32 on the CPU, without fused operators. images are the check's input,
    (batch, 3, side, side). facts are added to the JSON.
    """
    is_onnx = output_format == 'onnx'
    files = [f'{stem}.onnx'] if is_onnx else [f'{stem}-symbol.json', f'{stem}-0000.params']
    names = [*files, f'{stem}.{output_format}.json']
    refuse_existing(out / name for name in names)  # before the work
    expected = net(images).asnumpy()
    with new_files(out, is_repeatable=False) as folder, TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / stem
        net.export(str(written))
        if is_onnx:
            _convert_to_onnx(written, images.shape[1:])
        got = _run_onnx(written, images) if is_onnx else _run_gluon(written, images)
        measured = difference(expected, got)
        if not measured.relative <= LIMIT:  # also true for NaN
            raise RunFailed(
                f'{out / names[0]}: not written; got logits that differ by '
                f'{measured.absolute:.3g}, {measured.relative:.3g} of the largest logit, expected '
                f'at most {LIMIT:g} of it'
            )
        check = {
            'images': measured.num_images,
            'max_absolute_difference': measured.absolute,
            'max_relative_difference': measured.relative,
        }
        description = {**facts, 'format': output_format, 'files': files, 'check': check}
        dump_json(Path(scratch) / names[-1], description)
        for name in names:
            (Path(scratch) / name).rename(folder / name)
    return [out / name for name in names], measured


def _convert_to_onnx(stem: Path, shape: tuple[int, ...]) -> None:
    import onnx

    mx.onnx.export_model(
        f'{stem}-symbol.json',
        f'{stem}-0000.params',
        [(1, *shape)],
        [np.float32],
        f'{stem}.onnx',
        dynamic=True,
        dynamic_input_shapes=[('batch', *shape)],
    )
    network = onnx.load(f'{stem}.onnx')
    # MXNet lists the parameters, too; onnxruntime would warn of each
    del network.graph.input[1:]
    onnx.save(network, f'{stem}.onnx')


def _run_gluon(stem: Path, images: NDArray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # hides MXNet's warning about the unknown input type
        net = mx.gluon.SymbolBlock.imports(f'{stem}-symbol.json', [INPUT], f'{stem}-0000.params')
    return net(images).asnumpy()


def _run_onnx(stem: Path, images: NDArray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(f'{stem}.onnx', providers=['CPUExecutionProvider'])
    return session.run(None, {INPUT: images.asnumpy()})[0]
