"""Make RecordIO files and a manifest from images."""
from collections.abc import Sequence

from mlperf_rn50.cli._parsers import Parser

EPILOG = """examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 prepare cifar10 --out data/cifar10
  mlperf-rn50 prepare imagenet --source /data/ILSVRC2012 --out data/imagenet
  mlperf-rn50 prepare folder --source pictures --out data/pictures   (pictures/{train,val}/<class>/*)"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser('prepare', __doc__, EPILOG)
    parser.add_argument('dataset', choices=['digits', 'cifar10', 'imagenet', 'folder'], help='kind of the source')
    parser.add_argument('--out', metavar='DIR', required=True, help='where the files go')
    parser.add_argument('--source', metavar='PATH',
                        help='imagenet: folder with the two tars, or with train/ and val/; folder: the same; '
                             'cifar10: archive, .tgz or folder (fetched when not given)')
    parser.add_argument('--ground-truth', metavar='FILE',
                        help='imagenet: synset of each validation image, for a flat validation tar or folder')
    parser.add_argument('--name', help='folder: name of the data set, shown beside its accuracy')
    parser.add_argument('--resize-shorter', type=int, metavar='PIXELS',
                        help='re-encode with this shorter side (default: keep the files byte for byte)')
    parser.add_argument('--workers', type=int, metavar='N', help='processes (default: the cores of this machine)')
    parser.add_argument('--skip-corrupt', action='store_true', help='leave damaged images out and list them')
    parser.add_argument('--allow-partial', action='store_true', help='imagenet: accept another number of images')
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = make_parser().parse_args(argv)
    from mlperf_rn50.data.prepare import prepare
    return prepare(options)
