"""Export saved weights as ONNX or as Gluon symbol and parameters, verified against the network.

examples:
  mlperf-rn50 export logs/digits_cpu --format onnx --out exported
  mlperf-rn50 export weights/best.npz --format gluon --out exported --data.dir data/digits

The exported network is float32 and takes normalised images (batch, 3, side, side); its .json file
describes the normalisation. The files, loaded again, must match the network's logits within 1e-4
on validation images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.saved_weights import SavedWeights, add_weights_options, load_saved
from mlperf_rn50.errors import EXIT_OK, DataError
from mlperf_rn50.parser import Parser, add_option

if TYPE_CHECKING:
    import mxnet as mx

    from mlperf_rn50.config import Config

_NUM_IMAGES = 64


def make_parser() -> Parser:
    parser = command_parser('export', __doc__)
    add_weights_options(parser)
    add_option(
        parser,
        '--format',
        'file format: onnx, or gluon for mxnet.gluon.SymbolBlock.imports',
        choices=['onnx', 'gluon'],
        required=True,
    )
    add_option(parser, '--out DIR', 'output folder (default: the current folder)', default='.')
    add_option(
        parser,
        '--data.dir DIR',
        'folder of the validation images (default: the data folder of the run)',
        dest='data_dir',
    )
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if options.format == 'onnx':  # report a missing package before the work, which takes a while
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    import mxnet  # noqa: F401

    from mlperf_rn50.model.export import export
    from mlperf_rn50.text import printable
    from mlperf_rn50.train.evaluate import data_label

    weights = load_saved(options.path, options.which)
    words = [f'--data.dir={options.data_dir}'] if options.data_dir else []
    config, net = weights.portable_network(words)
    files, difference = export(
        net,
        images=_images(config),
        out=Path(options.out),
        stem=f'{config.model.name}_{weights.path.stem}',
        output_format=options.format,
        facts=_facts(weights, config),
    )
    print(
        f'weights      {printable(str(weights))}\n'
        f'checked      on {difference.num_images} validation images of '
        f'{printable(data_label(config.data))}\n'
        f'difference   at most {difference.absolute:.3g}, which is {difference.relative:.3g} of '
        'the largest logit\n'
        f'wrote        {", ".join(map(str, files))}'
    )
    return EXIT_OK


def _images(config: Config) -> mx.nd.NDArray:
    """Return the first images of the validation set."""
    from mlperf_rn50.data.batches import eval_batches
    from mlperf_rn50.data.shards import Shard

    size = min(_NUM_IMAGES, config.data.num_val)
    try:
        return next(eval_batches(config, Shard(config.data.num_val, 0, 1, size), None)()).images
    except DataError as e:
        text = str(e).partition('; set data.')[0]  # export has only one of these options
        raise DataError(
            f'{text}; the export is verified with validation images of the same data set; set '
            'their folder with --data.dir'
        ) from e


def _facts(weights: SavedWeights, config: Config) -> dict:
    """Describe inputs, outputs and origin of the exported network."""
    description = weights.description
    data = config.data
    side = data.image_size
    return {
        'model': config.model.name,
        'input': {
            'name': 'data',
            'shape': ['batch', 3, side, side],
            'dtype': 'float32',
            'layout': 'NCHW',
            'colours': 'RGB',
            'resize_shorter': data.resize_shorter,
            'interpolation': data.interpolation,
            'centre_crop': side,
            'mean': list(data.mean),
            'std': list(data.std),
            'values': '(pixel in 0..255 - mean) / std',
        },
        'output': 'logits, (batch, classes), float32',
        'classes': list(description.classes),
        'dataset': data.dataset,
        'top1': description.top1,
        'eval_flip': data.eval_flip,
        'epoch': description.epoch,
        'weights_sha256': description.sha256,
        'program_version': description.program_version,
    }
