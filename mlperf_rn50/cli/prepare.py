"""Create RecordIO files and a manifest from images, or verify existing files.

examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 prepare cifar10 --out data/cifar10
  mlperf-rn50 prepare imagenet --source /data/ILSVRC2012 --out data/imagenet
  mlperf-rn50 prepare folder --source pictures --out data/pictures   (pictures/{train,val}/<class>/*)
  mlperf-rn50 prepare --verify data/imagenet   (reads every record; if any is damaged, lists it and exits with code 1)
"""
from collections.abc import Sequence

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.parser import Parser


def make_parser() -> Parser:
    parser = command_parser('prepare', __doc__)
    parser.usage = ('mlperf-rn50 prepare {digits,cifar10,imagenet,folder} --out DIR [options]\n'
                    '       mlperf-rn50 prepare --verify DIR [--workers N]')
    add = parser.add_argument
    add('dataset', nargs='?', choices=['digits', 'cifar10', 'imagenet', 'folder'], help='data set to prepare')
    add('--out', metavar='DIR', help='output folder')
    add('--verify', metavar='DIR', help='verify the checksums of all files and records of this folder; writes nothing')
    add('--source', metavar='PATH',
        help='imagenet: folder with the two tars, or with train/ and val/; folder: folder with train/ and val/; '
             'cifar10: archive (.tar.gz or .tgz) or folder (default: download)')
    add('--ground-truth', metavar='FILE',
        help='imagenet: file with the synsets of the validation images, if these are not in a folder per synset')
    add('--name', help='folder: name of the data set, shown next to accuracies')
    add('--resize-shorter', type=int, metavar='PIXELS',
        help='new length of the shorter side; resized images are encoded again (default: unchanged files)')
    add('--workers', type=int, metavar='N', help='processes, or threads with --verify (default: number of cores)')
    add('--skip-corrupt', action='store_true', help='skip damaged images and list them')
    add('--allow-partial', action='store_true', help='imagenet: accept a different number of images or classes')
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    missing = [name for name, value in (('data set', options.dataset), ('--out DIR', options.out)) if not value]
    if options.verify is None and missing:
        parser.error(f'got no {" and no ".join(missing)}, expected a data set and --out, or --verify DIR')
    others = [k for k, v in vars(options).items() if v != parser.get_default(k) and k not in ('verify', 'workers')]
    if options.verify is not None and others:
        other = 'a data set' if others[0] == 'dataset' else f'--{others[0].replace("_", "-")}'
        parser.error(f'--verify: got {other} too, expected only a folder and --workers')
    from mlperf_rn50.data.prepare.command import prepare
    return prepare(options)
