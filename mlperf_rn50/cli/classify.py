"""Say what kept weights take pictures for: the five likeliest classes of each file."""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.weights import add_weights_options, load_kept
from mlperf_rn50.errors import EXIT_OK, EXIT_USAGE, DataError
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    import mxnet as mx
    import numpy as np

    from mlperf_rn50.config import Config

EPILOG = """examples:
  mlperf-rn50 classify logs/digits_cpu seven.png photo.webp
  mlperf-rn50 classify weights/best.npz *.jpg --format json

A picture goes the way of the evaluation: resized, its centre cut out, normalised. The network computes in float32 on
the CPU. A file that is no picture is named, the others are answered, and the exit code is 2."""
_NUM_SHOWN = 5


@dataclass(frozen=True)
class Guess:
    """A class by name and number, and its probability from 0 to 1."""

    name: str
    number: int
    probability: float


def make_parser() -> Parser:
    parser = command_parser('classify', __doc__, EPILOG)
    add_weights_options(parser)
    parser.add_argument('images', metavar='IMAGE', nargs='+', help='any format that Pillow reads')
    parser.add_argument('--format', choices=['table', 'json'], default='table', help='how to print the answers')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    import mxnet  # noqa: F401 (is it there? Before the weights are looked for)

    from mlperf_rn50.mllog.events import printable
    kept = load_kept(options.path, options.which)
    config, net = kept.portable_network()
    answers: dict[str, list[Guess] | DataError] = {}
    for name in options.images:
        try:
            answers[name] = classify(net, name, config, kept.description.classes)
        except DataError as e:
            answers[name] = e
            print(f'mlperf-rn50: {printable(str(e))}', file=sys.stderr, flush=True)
    render = render_json if options.format == 'json' else render_table
    if shown := render(answers):
        print(shown)
    return EXIT_USAGE if any(isinstance(a, DataError) for a in answers.values()) else EXIT_OK


def classify(net: mx.gluon.HybridBlock, name: str, config: Config, classes: Sequence[str]) -> list[Guess]:
    """The likeliest classes of a picture."""
    from mlperf_rn50.data.pictures import encode_picture, transform_picture
    encoded = encode_picture(Path(name))
    return likeliest(net(transform_picture(encoded, config, name)).asnumpy()[0], classes)


def likeliest(logits: np.ndarray, classes: Sequence[str]) -> list[Guess]:
    """The classes of the largest logits, (classes,), with their probabilities (softmax)."""
    import numpy as np
    values = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind='stable')[:_NUM_SHOWN]
    return [Guess(classes[i], int(i), float(values[i] / values.sum())) for i in order]


def render_table(answers: dict[str, list[Guess] | DataError]) -> str:
    """The answers for a person: a row per file, the likeliest class first."""
    from tabulate import tabulate

    from mlperf_rn50.mllog.events import printable
    rows = [[printable(name), *(f'{printable(g.name)} {100 * g.probability:.1f} %' for g in found)]
            for name, found in answers.items() if not isinstance(found, DataError)]
    titles = ['file', 'likeliest', *(f'{i}.' for i in range(2, _NUM_SHOWN + 1))]
    return tabulate(rows, titles[:len(rows[0])], disable_numparse=True) if rows else ''


def render_json(answers: dict[str, list[Guess] | DataError]) -> str:
    """The answers for a program."""
    return json.dumps({'images': [
        {'file': name, 'error': str(found)} if isinstance(found, DataError)
        else {'file': name, 'classes': [asdict(g) for g in found]} for name, found in answers.items()]}, indent=1)
