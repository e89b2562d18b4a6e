"""Create RecordIO files and a manifest from images, or verify existing files.

examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 prepare cifar10 --out data/cifar10
  mlperf-rn50 prepare imagenet --source /data/ILSVRC2012 --out data/imagenet
  mlperf-rn50 prepare folder --source pictures --out data/pictures
      (pictures/{train,val}/<class>/*)
  mlperf-rn50 prepare folder --source pictures --out data/pictures --validation 0.1
      (pictures/<class>/*)
  mlperf-rn50 prepare im2rec --source records --out data/mine --name mine
      (records/{train,val}.{rec,idx}, not copied)
  mlperf-rn50 prepare --verify data/imagenet
      (reads every record; if any is damaged, lists it and exits with code 1)

folder and im2rec also write a first configuration, train.yaml, and print the command that trains
with it.
"""

from collections.abc import Sequence
from functools import partial

from mlperf_rn50.bounds import MAX_SIDE
from mlperf_rn50.cli.parsers import command_parser, count, given_arguments, positive
from mlperf_rn50.parser import Parser, option_adder

_DATASETS_OF = {
    '--source': ('imagenet', 'folder', 'im2rec', 'cifar10'),
    '--ground-truth': ('imagenet',),
    '--allow-partial': ('imagenet',),
    '--validation': ('folder',),
    '--name': ('folder', 'im2rec'),
}


def make_parser() -> Parser:
    parser = command_parser('prepare', __doc__)
    parser.usage = (
        'mlperf-rn50 prepare {digits,cifar10,imagenet,folder,im2rec} --out DIR [options]\n'
        '       mlperf-rn50 prepare --verify DIR [--workers N]'
    )
    add = option_adder(parser)
    add(
        'dataset',
        'data set to prepare',
        nargs='?',
        choices=['digits', 'cifar10', 'imagenet', 'folder', 'im2rec'],
    )
    add('--out DIR', 'output folder')
    add(
        '--verify DIR',
        'verify the checksums of all files and records of this folder; writes nothing',
    )
    add(
        '--source PATH',
        'imagenet: folder with the two tars, or with train/ and val/; folder: folder with '
        'train/ and val/; im2rec: folder with train.rec and val.rec; cifar10: archive (.tar.gz or '
        '.tgz) or folder (default: download)',
    )
    add(
        '--ground-truth FILE',
        'imagenet: file with the synsets of the validation images, if these are not in a '
        'folder per synset',
    )
    add(
        '--validation FRACTION',
        'folder: fraction of each class to take for validation, selected by a hash of the '
        'file names; the source then has a folder per class, or train/ without val/',
        type=partial(positive, most=0.99, expected='a fraction up to 0.99, such as 0.1'),
    )
    add(
        '--name NAME',
        'folder, im2rec: name of the data set, shown next to accuracies (default: name of '
        'the source)',
    )
    add(
        '--resize-shorter PIXELS',
        'new length of the shorter side; resized images are encoded again (default: '
        'unchanged files)',
        type=count(MAX_SIDE),
    )
    add('--workers N', 'number of threads (default: number of cores)', type=count(1024))
    add('--skip-corrupt', 'skip damaged images and list them')
    add('--allow-partial', 'imagenet: accept a different number of images or classes')
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    required = {'data set': options.dataset, '--out DIR': options.out}
    missing = [name for name, value in required.items() if not value]
    if options.verify is None and missing:
        parser.error(
            f'got no {" and no ".join(missing)}, expected a data set and --out, or --verify DIR'
        )
    for name, datasets in _DATASETS_OF.items():
        value = getattr(options, name[2:].replace('-', '_'))
        if value and options.dataset not in (None, *datasets):
            parser.error(
                f'{name}: got {value} with {options.dataset}, expected it with '
                f'{", ".join(datasets)} only'
            )
    if options.dataset == 'im2rec' and (options.resize_shorter or options.skip_corrupt):
        parser.error(
            'im2rec: got --resize-shorter or --skip-corrupt, expected neither, because records '
            'stay unchanged'
        )
    others = given_arguments(parser, options, '--verify', '--workers')
    if options.verify is not None and others:
        other = others[0].replace('dataset', 'a data set')
        parser.error(f'--verify: got {other} too, expected only a folder and --workers')
    from mlperf_rn50.data.prepare.command import prepare

    return prepare(options)
