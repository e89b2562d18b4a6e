"""Make RecordIO files and a manifest from images, or see whether such files are still what was written."""
from argparse import Namespace
from collections.abc import Sequence

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.parser import Parser

EPILOG = """examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 prepare cifar10 --out data/cifar10
  mlperf-rn50 prepare imagenet --source /data/ILSVRC2012 --out data/imagenet
  mlperf-rn50 prepare folder --source pictures --out data/pictures   (pictures/{train,val}/<class>/*)
  mlperf-rn50 prepare --verify data/imagenet   (reads every record; exit code 1 names those that differ)"""
_USAGE = '''mlperf-rn50 prepare {digits,cifar10,imagenet,folder} --out DIR [options]
       mlperf-rn50 prepare --verify DIR [--workers N]'''


def make_parser() -> Parser:
    parser = command_parser('prepare', __doc__, EPILOG)
    parser.usage = _USAGE
    parser.add_argument('dataset', nargs='?', choices=['digits', 'cifar10', 'imagenet', 'folder'],
                        help='kind of the source')
    parser.add_argument('--out', metavar='DIR', help='where the files go')
    parser.add_argument('--verify', metavar='DIR',
                        help='make nothing: hold the files of this folder, and every record, against their checksums')
    parser.add_argument('--source', metavar='PATH',
                        help='imagenet: folder with the two tars, or with train/ and val/; folder: the same; '
                             'cifar10: archive, .tgz or folder (fetched when not given)')
    parser.add_argument('--ground-truth', metavar='FILE',
                        help='imagenet: synset of each validation image, for a flat validation tar or folder')
    parser.add_argument('--name', help='folder: name of the data set, shown beside its accuracy')
    parser.add_argument('--resize-shorter', type=int, metavar='PIXELS',
                        help='re-encode with this shorter side (default: keep the files byte for byte)')
    parser.add_argument('--workers', type=int, metavar='N',
                        help='processes, or threads of --verify (default: the cores of this machine)')
    parser.add_argument('--skip-corrupt', action='store_true', help='leave damaged images out and list them')
    parser.add_argument('--allow-partial', action='store_true', help='imagenet: accept another number of images')
    return parser


def parse_options(argv: Sequence[str]) -> Namespace:
    """The options of the command line: a data set and --out, or --verify; raise ConfigError for neither or both."""
    parser = make_parser()
    options = parser.parse_args(argv)
    missing = [name for name in ('dataset', 'out') if not getattr(options, name)]
    if options.verify is None and missing:
        names = ['--out DIR' if n == 'out' else 'data set' for n in missing]
        parser.error(f'got no {" and no ".join(names)}, expected a data set and --out, or --verify DIR')
    others = [k for k, v in vars(options).items() if v != parser.get_default(k) and k not in ('verify', 'workers')]
    if options.verify is not None and others:
        other = 'a data set' if others[0] == 'dataset' else f'--{others[0].replace("_", "-")}'
        parser.error(f'--verify: got {other} as well, expected a folder, and --workers at most')
    return options


def run(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    from mlperf_rn50.data.prepare.command import prepare
    return prepare(options)
