"""Usage errors of every command: one line with the option and what is expected, exit code 2, and no
output."""

import shlex

import pytest
from helpers import ROOT, call, shipped_logs

CONFIG = ROOT / 'launch/configs/digits_cpu.yaml'
FIVE, ONE = shipped_logs() / 'digits_five', shipped_logs() / 'digits_sweep/1x1'
PREDICT = 'predict dgxa100_ngc20.06_mxnet --layouts'
SWEEP = f'sweep --study x --config {CONFIG} --layouts'
PRICE = 'expected a number above 0 and at most 1e9, such as 3.5'


@pytest.mark.parametrize(
    'words, message',
    [
        ('-x', '-x: unknown option; see mlperf-rn50 --help'),
        ('--version=1', '--version: ignored explicit argument'),
        ('--degub report', '--degub: unknown option; did you mean --debug?'),
        ('raport', 'raport: unknown command; did you mean report?; expected one of'),
        (
            'export',
            'RUN|WEIGHTS, --format {onnx,gluon}: missing; for example: mlperf-rn50 export '
            'logs/digits_cpu ',
        ),
        ('bench', '{train,data,allreduce,ops}: missing; see mlperf-rn50 bench --help'),
        ('-v', '-v: unknown option; did you mean --version?'),
        ('report x --price 3', '--price: unknown option; did you mean --price-per-node-hour?'),
        (
            'report published/2.0/del',
            'published/v2.0/del: no such published sets; did you mean published/v2.0/Dell?',
        ),
        (f'train {CONFIG}', f'{CONFIG}: unexpected argument; did you mean --config {CONFIG}?'),
        ('report x --fromat csv', '--fromat: unknown option; did you mean --format?'),
        ('report x --rows runs', '--rows: got --format text, expected --format csv'),
        *((f'report x --price-per-node-hour {price}', PRICE) for price in ('0', 'nan', 'free')),
        ('train --train.local_batch_siz=8', 'did you mean --train.local_batch_size?'),
        # bench
        ('bench train --ranks 2', '--ranks: got 2, expected at most 1'),
        ('bench train --steps 0', '--steps: got 0, expected 1 or more'),
        ('bench allreduce', 'ranks: got 1, expected 2 or more'),
        ('bench data --data.synthetic true', 'data.synthetic: got true, expected false'),
        ('bench ops --model.name vgg16', 'model.name: got vgg16, expected a ResNet'),
        # launch, sweep
        (
            f'launch apptainer --config {CONFIG}',
            '--image: got nothing, expected an Apptainer image',
        ),
        ('launch apptainer --image none.sif', '--image: none.sif does not exist; build it with'),
        ('launch local --seeds 0', '--seeds: got 0, expected a whole number, 1 or more'),
        (
            'launch local --nodes',
            '--nodes: expected one argument; see mlperf-rn50 launch local --help',
        ),
        (
            f'launch local --config {CONFIG} --train.max_epoch 1',
            '--train.max_epoch: unknown option; did you mean',
        ),
        (
            f'launch local --config {CONFIG} --ranks-per-nodes 2',
            'unknown option; did you mean --ranks-per-node?',
        ),
        (
            f'launch mpirun --config {CONFIG} --host h1',
            '--host: unknown option; did you mean --hosts?',
        ),
        ('launch mpi', "invalid choice: 'mpi' (choose from 'local', 'mpirun', "),
        ('launch kubernetes --image x', '--volume CLAIM:PATH'),
        ('launch ranks 2', 'PROGRAM: missing'),
        ('launch ranks 0 true', 'RANKS: got 0, expected a whole number, 1 or more'),
        (
            'sweep --study x',
            'hosts --config launch/configs/c4140_v100_1node.yaml; see mlperf-rn50 sweep --help',
        ),
        (f'{SWEEP} 1x1 --study ../x', "--study: got '../x', expected a name"),
        (f"{SWEEP} ' '", '--layouts: got nothing'),
        (f'{SWEEP} 1x', 'expected nodes x ranks, such as 2x4'),
        (f'{SWEEP} 1x1 --lr-table /no', '--lr-table: /no'),
        (f'{SWEEP} 1x1 --schedule.base_lr=1', '--schedule.base_lr: layouts have different values'),
        (f'{SWEEP} 1x1 --run-dir x', '--run-dir: the sweep sets this option'),
        # package
        ('package runs --org us', '--system SYSTEM, --out DIR: missing'),
        ('package --check x --org us', '--check: got --org too, expected only a finished tree'),
        ('package --check x', '--check: x contains no results folder'),
        ('package FIVE ONE --org us --system x --out o', 'RUNS: got 2 sets'),
        # predict
        ('predict', 'SOURCE: missing'),
        ('predict nvidia', 'nvidia: not a file, folder'),
        (f'{PREDICT} 1x{"9" * 5000}', '1x9'),
        (f"{PREDICT} ' '", '--layouts'),
        (f'{PREDICT} 1x8 --weak --strong', '--strong'),
        (f"{PREDICT} 1x8 --out ''", '--out'),
        (f'{PREDICT} 1x8 --link-gbit-s nan', 'nan'),
        (f"{PREDICT} 1x8 --what-if ''", '--what-if'),
        (
            f"{PREDICT} 1x8 --what-if 'link=25 port=2'",
            'unknown field `port`; expected any of link=GBIT_S',
        ),
        *(
            (f'{PREDICT} 1x8 --what-if {text}', '$.l')
            for text in ('link=nan', 'link=0', 'link', 'local=1.5')
        ),
        *(
            (f"{PREDICT} 1x8 --what-if '{text}'", 'expected changes such as link=25, each once')
            for text in (' ', 'link=25 link=2', 'generation=', 'tcp=false')
        ),
        (f'{PREDICT} 1x8 --what-if link=x', 'Expected `float | null`'),
        ('predict --validate --layouts 1x2', '--layouts'),
        # prepare
        (
            'prepare',
            'got no data set and no --out DIR, expected a data set and --out, or --verify DIR',
        ),
        ('prepare digits --verify x', '--verify: got a data set too'),
        ('prepare --verify x --skip-corrupt', '--verify: got --skip-corrupt too'),
        (
            'prepare --verify x',
            '--verify: x has no manifest.json; expected a folder written by prepare',
        ),
        (
            'prepare imagenet --source / --out x --validation 0.1',
            '--validation: got 0.1 with imagenet, expected it with',
        ),
        *(
            (
                f'prepare im2rec --source / --out x {option}',
                'got --resize-shorter or --skip-corrupt, expected neither',
            )
            for option in ('--skip-corrupt', '--resize-shorter 8')
        ),
        # watch
        ('watch', 'RUN_FOLDER'),
        ('watch x --format json', '--format json: got no --once'),
        ('watch x --every 0', '--every: got 0, expected'),
        ('watch x --every nan', '--every: got nan'),
        ('watch x --price-per-node-hour -1', 'got -1, expected a number'),
    ],
    ids=lambda text: text[:40],
)
def test_usage_error_is_one_line(words, message):
    done = call(*({'FIVE': FIVE, 'ONE': ONE}.get(word, word) for word in shlex.split(words)))
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert (
        message in done.stderr
        and done.stderr.startswith('mlperf-rn50: ')
        and done.stderr.count('\n') == 1
    )
    assert len(done.stderr) < 500
