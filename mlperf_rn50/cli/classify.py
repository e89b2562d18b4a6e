"""Classify images with saved weights and show the five most likely classes of each.

examples:
  mlperf-rn50 classify logs/digits_cpu seven.png photo.webp
  mlperf-rn50 classify logs/pictures new_images   (all images in the folder and the folders in it)
  mlperf-rn50 classify weights/best.npz *.jpg --format json

Images are resized, centre-cropped and normalised as in an evaluation. The network computes in
float32 on the CPU. A file that is not an image is reported, the other files are still classified,
and the exit code is 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlperf_rn50.answer import Answer, Cell, Table
from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_wide_option, command_parser
from mlperf_rn50.cli.saved_weights import add_weights_options, load_saved
from mlperf_rn50.errors import EXIT_OK, EXIT_USAGE, DataError
from mlperf_rn50.files import files_below
from mlperf_rn50.parser import Parser, add_option
from mlperf_rn50.text import printable

if TYPE_CHECKING:
    import numpy as np

_NUM_SHOWN = 5


class Guess(NamedTuple):
    name: str
    number: int
    probability: float  # from 0 to 1


def make_parser() -> Parser:
    parser = command_parser('classify', __doc__)
    add_weights_options(parser)
    add_option(
        parser,
        'images IMAGE',
        'image in any format that Pillow reads, or folder of images',
        nargs='+',
    )
    add_format_option(parser)
    add_wide_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    import mxnet  # noqa: F401 (a missing package is reported before missing weights)
    import numpy as np

    from mlperf_rn50.data.images import encode_file, network_input
    from mlperf_rn50.train.evaluate import with_mirror

    weights = load_saved(options.path, options.which)
    config, network = weights.portable_network()
    net = with_mirror(network, config)
    rows = []
    images: list[dict[str, Any]] = []
    for name in [file for given in options.images for file in _files_of(given)]:
        try:
            logits = net(network_input(encode_file(Path(name)), config)).asnumpy()[0]
            if not np.isfinite(logits).all():
                raise DataError(
                    f'{name}: got values from the network that are not numbers, expected finite '
                    'ones; use other weights'
                )
        except DataError as e:
            images.append({'file': name, 'error': str(e)})
            print(f'mlperf-rn50: {printable(str(e))}', file=sys.stderr, flush=True)
            continue
        guesses = likeliest(logits, weights.description.classes)
        images.append({'file': name, 'classes': [g._asdict() for g in guesses]})
        shown = [Cell(f'{g.name} {100 * g.probability:.1f} %') for g in guesses]
        rows.append((Cell(name), *shown))
    titles = ('file', 'likeliest', *(f'{i}.' for i in range(2, _NUM_SHOWN + 1)))
    head = titles[: len(rows[0])] if rows else ()
    answer = Answer(
        tables=[Table('', head, rows)],
        data={'images': images},
        exit_code=EXIT_OK if len(rows) == len(images) else EXIT_USAGE,
    )
    return print_answer(answer, options)


def _files_of(name: str) -> list[str]:
    """Return the images in a folder and its folders, in order of name. Return anything else
    unchanged."""
    from mlperf_rn50.data.prepare.folders import ENDINGS, is_hidden

    if not os.path.isdir(name):
        return [name]

    def refuse(error: OSError) -> None:
        if not any(map(is_hidden, Path(error.filename).relative_to(name).parts)):
            raise error

    found = [p for p in files_below(Path(name), onerror=refuse) if p.suffix.lower() in ENDINGS]
    shown = [p for p in found if not any(map(is_hidden, p.relative_to(name).parts))]
    return sorted(map(str, shown)) or [name]


def likeliest(logits: np.ndarray, classes: Sequence[str]) -> list[Guess]:
    """Return the classes with the largest logits, and their softmax probabilities. logits: shape
    (classes,)."""
    import numpy as np

    values = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind='stable')[:_NUM_SHOWN]
    return [Guess(classes[i], int(i), float(values[i] / values.sum())) for i in order]
