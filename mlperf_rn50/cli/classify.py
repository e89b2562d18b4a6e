"""Classify pictures with saved weights and show the five most likely classes of each.

examples:
  mlperf-rn50 classify logs/digits_cpu seven.png photo.webp
  mlperf-rn50 classify logs/pictures new_pictures   (all images in the folder and the folders in it)
  mlperf-rn50 classify weights/best.npz *.jpg --format json

Pictures are resized, centre-cropped and normalised as in an evaluation. The network computes in
float32 on the CPU. A file that is not a picture is reported, the other files are still classified,
and the exit code is 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.weights import add_weights_options, load_saved
from mlperf_rn50.errors import EXIT_OK, EXIT_USAGE, DataError
from mlperf_rn50.parser import Parser

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
    parser.add_argument(
        'images',
        metavar='IMAGE',
        nargs='+',
        help='picture in any format that Pillow reads, or folder of pictures',
    )
    parser.add_argument(
        '--format',
        choices=['table', 'json'],
        default='table',
        help='output format (default: table)',
    )
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    import mxnet  # noqa: F401 (a missing package is reported before missing weights)

    from mlperf_rn50.data.images import encode_file, network_input
    from mlperf_rn50.text import printable

    weights = load_saved(options.path, options.which)
    config, net = weights.portable_network()
    answers: dict[str, list[Guess] | DataError] = {}
    for name in (file for given in options.images for file in _files_of(given)):
        try:
            logits = net(network_input(encode_file(Path(name)), config)).asnumpy()[0]
            answers[name] = likeliest(logits, weights.description.classes)
        except DataError as e:
            answers[name] = e
            print(f'mlperf-rn50: {printable(str(e))}', file=sys.stderr, flush=True)
    if options.format == 'json':
        print(
            json.dumps(
                {
                    'images': [
                        {'file': name, 'error': str(a)}
                        if isinstance(a, DataError)
                        else {'file': name, 'classes': [g._asdict() for g in a]}
                        for name, a in answers.items()
                    ]
                },
                indent=1,
            )
        )
    elif table := _render_table(
        {name: a for name, a in answers.items() if not isinstance(a, DataError)}
    ):
        print(table)
    return EXIT_USAGE if any(isinstance(a, DataError) for a in answers.values()) else EXIT_OK


def _files_of(name: str) -> list[str]:
    """Return the images in a folder and its folders, in order of name. Return anything else
    unchanged."""
    from mlperf_rn50.data.prepare.folders import ENDINGS

    return sorted(
        str(p) for p in Path(name).rglob('*') if p.suffix.lower() in ENDINGS and p.is_file()
    ) or [name]


def likeliest(logits: np.ndarray, classes: Sequence[str]) -> list[Guess]:
    """Return the classes with the largest logits, and their softmax probabilities. logits: shape
    (classes,)."""
    import numpy as np

    values = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind='stable')[:_NUM_SHOWN]
    return [Guess(classes[i], int(i), float(values[i] / values.sum())) for i in order]


def _render_table(answers: dict[str, list[Guess]]) -> str:
    from tabulate import tabulate

    from mlperf_rn50.text import printable

    rows = [
        [printable(name), *(f'{printable(g.name)} {100 * g.probability:.1f} %' for g in guesses)]
        for name, guesses in answers.items()
    ]
    titles = ['file', 'likeliest', *(f'{i}.' for i in range(2, _NUM_SHOWN + 1))]
    return tabulate(rows, titles[: len(rows[0])], disable_numparse=True) if rows else ''
