"""Export kept weights as ONNX or as Gluon's symbol and parameters, checked against the network."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.weights import add_weights_options, load_kept
from mlperf_rn50.errors import EXIT_OK, DataError
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    import mxnet as mx

    from mlperf_rn50.config import Config
    from mlperf_rn50.model.weights import WeightsDescription

EPILOG = """examples:
  mlperf-rn50 export logs/digits_cpu --format onnx --out exported
  mlperf-rn50 export weights/best.npz --format gluon --out exported --data.dir data/digits

The network is written in float32, for images (batch, 3, side, side) that are normalised already: the .json beside it
says how. What was written is loaded again and must compute what the network does, on images of the validation set."""
_NUM_IMAGES = 64


def make_parser() -> Parser:
    parser = command_parser('export', __doc__, EPILOG)
    add_weights_options(parser)
    parser.add_argument('--format', choices=['onnx', 'gluon'], required=True,
                        help='onnx, or gluon: what mxnet.gluon.SymbolBlock.imports loads')
    parser.add_argument('--out', metavar='DIR', default='.', help='where the files go (default: here)')
    parser.add_argument('--data.dir', metavar='DIR', dest='data_dir',
                        help='validation images for the check (default: where the run had them)')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if options.format == 'onnx':  # are they there? The work takes a while
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    import mxnet  # noqa: F401

    from mlperf_rn50.mllog.events import printable
    from mlperf_rn50.model.export import export
    from mlperf_rn50.train.evaluate import data_name
    kept = load_kept(options.path, options.which)
    config, net = kept.portable_network([f'--data.dir={options.data_dir}'] if options.data_dir else [])
    files, found = export(net, _images(config), Path(options.out), f'{config.model.name}_{kept.path.stem}',
                          options.format, _facts(kept.description, config))
    name = printable(data_name(config.data))
    print(f'weights      {printable(str(kept))}\n'
          f'checked      on {found.num_images} validation images of {name}\n'
          f'difference   at most {found.absolute:.3g}, {found.relative:.3g} of the largest logit\n'
          f'wrote        {", ".join(str(f) for f in files)}')
    return EXIT_OK


def _images(config: Config) -> mx.nd.NDArray:
    """The first images of the validation set."""
    from mlperf_rn50.data.batches import eval_batches
    from mlperf_rn50.data.shards import Shard
    size = min(_NUM_IMAGES, config.data.num_val)
    try:
        batch = next(eval_batches(config, Shard(config.data.num_val, 0, 1, size), None)())
    except DataError as e:
        raise DataError(f'{e}; the export is checked on validation images: say where they are with '
                        '--data.dir DIR') from e
    return batch.images


def _facts(description: WeightsDescription, config: Config) -> dict:
    """What a user of the network has to know."""
    data, side = config.data, config.data.image_size
    return {'model': config.model.name, 'input': {
        'name': 'data', 'shape': ['batch', 3, side, side], 'dtype': 'float32', 'layout': 'NCHW', 'colours': 'RGB',
        'resize_shorter': data.resize_shorter, 'interpolation': data.interpolation, 'centre_crop': side,
        'mean': list(data.mean), 'std': list(data.std), 'values': '(pixel in 0..255 - mean) / std'},
        'output': 'logits, (batch, classes), float32', 'classes': list(description.classes),
        'dataset': data.dataset, 'top1': description.top1, 'epoch': description.epoch,
        'weights_sha256': description.sha256, 'program_version': description.program_version}
