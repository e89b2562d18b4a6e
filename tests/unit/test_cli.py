"""Command line: help, missing packages, colour, output streams, and usage errors of all
commands."""

import configparser
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
from helpers import CLI, HANG_LIMIT_S, ROOT, Terminal, call, json_table, run, shipped_logs
from lines import write_set

from mlperf_rn50 import __version__
from mlperf_rn50.cli import COMMANDS, EXTRAS, explain_missing
from mlperf_rn50.cli.terminal import has_colour, paint
from mlperf_rn50.config import SECTIONS

# Distributions whose names differ from the imported module.
DISTRIBUTIONS = {
    'nvidia': 'nvidia-dali-cuda120',
    'pil': 'pillow',
    'pynvml': 'nvidia-ml-py',
    'sklearn': 'scikit-learn',
}
INSTALL = 'is not installed; in the checkout, run launch/setup.sh'


def test_help_lists_every_command_and_is_printed_without_arguments():
    done = call('--help')
    assert done.returncode == 0 and call('help').stdout == done.stdout
    assert re.findall(r'^  (\w+) +[A-Z][a-z]+ ', done.stdout, re.MULTILINE) == list(COMMANDS)
    for name in COMMANDS:
        text = call(name, '--help').stdout
        assert f'examples:\n  mlperf-rn50 {name}' in text and call('help', name).stdout == text
    mistaken = call()
    assert (mistaken.returncode, mistaken.stdout, mistaken.stderr) == (2, '', done.stdout)


def test_help_of_a_group_lists_its_keys_and_the_short_help_the_groups():
    short, group = call('train', '--help').stdout, call('bench', '--help', 'schedule').stdout
    assert short.startswith('usage: mlperf-rn50 train [OPTIONS] [--KEY VALUE ...]\n\n')
    assert all(re.search(rf'^  {name} +[A-Z]', short, re.MULTILINE) for name in SECTIONS)
    assert '--run.dir' not in short
    keys = [f.name for f in fields(SECTIONS['schedule'])]
    assert re.findall(r'^  (\w+): ', group, re.MULTILINE) == keys
    assert ' 0)\n  base_lr: 0.1\n' in group and '--schedule.KEY VALUE' in group
    assert 'Literal' not in group
    assert call('help', 'train', 'comm').stdout == call('train', '--help', 'comm').stdout
    assert call('train', '--help', 'shedule').stdout == short


def test_help_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv('COLUMNS', '60')
    for words in (['export'], ['train'], ['launch', 'kubernetes']):
        lines = call('help', *words).stdout.splitlines()
        assert [x for x in lines[10:] if len(x) > 60 and not x.startswith('usage:')] == []


def test_version_lists_the_software_stack():
    first, packages, system, processor = call('--version').stdout.splitlines()
    assert first.startswith(f'mlperf-rn50 {__version__}') and system.startswith('Python 3.11.')
    assert all(f'{name} ' in packages for name in ('MXNet', 'DALI', 'Horovod', 'Open MPI'))
    assert ', ' in processor


def test_debug_shows_the_traceback():
    assert 'Traceback' in call('--debug', 'report', '/nonexistent').stderr
    assert 'Traceback' not in call('report', '/nonexistent').stderr


@pytest.mark.parametrize(
    'words, missing, message',
    [
        ('prepare digits --out x', 'sklearn', f"scikit-learn {INSTALL} or pip install '.[demo]'"),
        ('train --dry-run', 'jsonargparse', f'jsonargparse {INSTALL}'),
    ],
)
def test_missing_package_is_one_line_with_the_install_command(words, missing, message, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    done = call(*words.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, '', f'mlperf-rn50: {message}\n')


@pytest.mark.parametrize(
    'words, module, name',
    [
        ('prepare digits --out digits --workers 2', 'mxnet', 'MXNet'),
        ('doctor', 'nvidia', 'DALI'),
    ],
)
@pytest.mark.slow  # separate processes, because the test process may have imported the packages
def test_missing_package_that_is_imported_late_is_one_line(words, module, name, tmp_path):
    stand_in = f'raise ModuleNotFoundError("not here", name={module!r})\n'
    (tmp_path / f'{module}.py').write_text(stand_in)
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'}
    done = run([*CLI, *words.split()], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    [line] = [x for x in done.stderr.splitlines() if 'img/s' not in x]
    assert line == f'mlperf-rn50: {name} {INSTALL}'


@pytest.mark.parametrize(
    'words, library, fix',
    [
        ('doctor', 'libcuda.so.1', 'install it, or start the container with GPUs'),
        ('train --config {config} {more}', 'libcuda.so.1', 'install it, or start the container'),
        ('train --config {config} {more}', 'libnccl.so.2', 'run launch/setup.sh --check'),
        ('prepare digits --out x --workers 1', 'libnccl.so.2', 'run launch/setup.sh --check'),
    ],
)
def test_missing_library_is_one_line_with_what_to_do(words, library, fix, tmp_path):
    text = f'{library}: cannot open shared object file: No such file or directory'
    (tmp_path / 'mxnet.py').write_text(f'raise OSError({text!r})\n')
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'}
    config = ROOT / 'launch/configs/digits_cpu.yaml'
    words = words.format(config=config, more='--data.synthetic=true').split()
    done = run([*CLI, *words], cwd=tmp_path, env=env)
    [line] = [x for x in done.stderr.splitlines() if 'img/s' not in x]
    assert done.returncode == 1 and f' {library}: not found on this host; ' in line
    assert line.startswith('mlperf-rn50: ') and fix in line


@pytest.mark.parametrize('name', ['mlperf_rn50.nothing', None])
def test_any_other_missing_module_keeps_its_traceback(name):
    assert explain_missing(ModuleNotFoundError(f'No module named {name!r}', name=name)) is None


def names_of(lines):
    return {re.split('[=<>;]', line)[0].lower() for line in lines.split()}


def test_extras_contain_the_packages():
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    extras = setup['options.extras_require']
    always = names_of(setup['options']['install_requires'])
    for extra, packages in EXTRAS.items():
        shared = extras['train'] + extras['wheels'] if extra == 'cpu' else ''
        held = names_of(extras.get(extra, '') + shared)
        for module in packages:
            name = DISTRIBUTIONS.get(module.lower(), module.lower().replace('_', '-'))
            assert not extra or name in held | always, f'{name} is not in {extra}'


@pytest.fixture
def variables(monkeypatch):
    """Environment without colour settings."""
    for name in ('NO_COLOR', 'FORCE_COLOR'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TERM', 'xterm')
    return monkeypatch


@pytest.mark.parametrize(
    'set_to, on_terminal, in_file',
    json_table("""
""                         | true  | false
"NO_COLOR=1"               | false | false
"NO_COLOR="                | true  | false
"TERM=dumb"                | false | false
"FORCE_COLOR=1"            | true  | true
"FORCE_COLOR=1 NO_COLOR=1" | false | false
"""),
)
def test_colour_follows_terminal_and_environment(set_to, on_terminal, in_file, variables):
    for setting in set_to.split():
        variables.setenv(*setting.split('='))
    assert (has_colour(Terminal()), has_colour(io.StringIO())) == (on_terminal, in_file)


def test_report_text_is_the_same_with_and_without_colour(tmp_path, variables):
    write_set(
        tmp_path / 'sweep/1x4', 2, is_complete=True, status=lambda k: 'success' if k else 'aborted'
    )
    piped = call('report', tmp_path)
    variables.setenv('FORCE_COLOR', '1')
    shown = call('report', tmp_path).stdout
    assert (piped.returncode, piped.stderr) == (0, '') and '\x1b' not in piped.stdout
    assert re.findall(r'\x1b\[(3\d)m(\w+)\x1b', shown) == [('33', 'aborted'), ('32', 'converged')]
    assert (
        f'{paint("Runs", "bold")}\n' in shown and re.sub(r'\x1b\[\d+m', '', shown) == piped.stdout
    )


# --- output streams: closed pipes, full disks, and characters that the encoding lacks


@pytest.fixture(scope='module')
def log(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp('set'), 1, True) / 'result_0.txt'


# Output that fits a buffer, and output that is larger than any buffer.
LITTLE, LARGE = ['report', 'LOG'], ['check', *['LOG'] * 400]
PIPE = subprocess.PIPE


def run_into(log, words, stdout, stderr=PIPE):
    command = [*CLI, *(log if word == 'LOG' else word for word in words)]
    # Buffered, as usual, because argparse ignores write errors of unbuffered help texts.
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONUNBUFFERED'}
    keys = dict(text=True, timeout=HANG_LIMIT_S, env=env)
    return subprocess.run(command, stdout=stdout, stderr=stderr, **keys)


@pytest.mark.parametrize('words', [LITTLE, LARGE, ['report', '--help']])
def test_closed_pipe_ends_the_command_without_an_error(log, words):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(log, words, writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, '')  # 141 for a shell


def test_full_disk_is_a_one_line_error(log):
    message = 'mlperf-rn50: cannot write the output: No space left on device\n'
    with open('/dev/full', 'w') as full:
        for words in (LITTLE, LARGE):
            done = run_into(log, words, full)
            assert (done.returncode, done.stderr) == (1, message)
        # Unwritable errors keep the exit code.
        assert run_into(log, ['report', '/nonexistent'], PIPE, full).returncode == 2


def test_closed_output_is_not_an_error(log):
    code = f'import os, sys; os.close(1); os.execv(sys.executable, {[*CLI, "report", str(log)]!r})'
    done = run([sys.executable, '-c', code])
    assert (done.returncode, done.stderr) == (0, '')


def test_closed_streams_are_opened_before_files(tmp_path):
    """A progress bar needs stderr, and a file must not get its number."""
    words = ['prepare', 'digits', '--workers', '1', '--out', str(tmp_path / 'digits')]
    program = (
        f'import os; from mlperf_rn50.cli import main; main({words}); '
        "print([os.readlink(f'/proc/self/fd/{n}') for n in (0, 2)])"
    )
    done = run(['bash', '-c', 'exec "$@" <&- 2>&-', '-', sys.executable, '-c', program])
    assert done.stdout.splitlines()[-1] == str([os.devnull] * 2)
    assert (tmp_path / 'digits/train.rec').is_file()


def test_deleted_current_folder_is_one_line(tmp_path, monkeypatch):
    (tmp_path / 'gone').mkdir()
    monkeypatch.chdir(tmp_path / 'gone')
    (tmp_path / 'gone').rmdir()
    done = call('prepare', 'folder', '--source', 'x', '--out', tmp_path / 'out')
    assert (done.returncode, done.stderr.count('\n')) == (2, 1)
    assert 'the current folder has been deleted' in done.stderr


def test_page_is_written_for_a_user_without_home_and_name(log, tmp_path):
    code = f"""
import pwd, sys
pwd.getpwuid = lambda _: {{}}[0]  # as for a user number in a container
from mlperf_rn50.cli import main
sys.exit(main(['report', {str(log)!r}, '--out', {str(tmp_path / 'page')!r}]))"""
    without_home = {k: v for k, v in os.environ.items() if k != 'HOME'}
    done = run([sys.executable, '-c', code], env=without_home)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr
    assert (tmp_path / 'page/report.html').is_file()


@pytest.mark.parametrize(
    'name, variables',
    [
        ('系统', {'PYTHONIOENCODING': 'ascii'}),
        # file names are bytes
        ('box', {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}),
    ],
)
def test_characters_that_the_output_lacks_are_escaped(tmp_path, name, variables):
    folder = write_set(tmp_path / name, 2, True, epoch_s=lambda k: 10 + k)
    plain = {k: v for k, v in os.environ.items() if k not in ('PYTHONUTF8', 'PYTHONIOENCODING')}
    done = run([*CLI, 'report', folder, '--out', tmp_path / 'out'], env={**plain, **variables})
    assert done.returncode == 0 and 'Traceback' not in done.stderr, done.stderr
    assert '\\xb1' in done.stdout and done.stdout.isascii()
    for file in ('report.md', 'report.html', 'report.csv'):
        assert name in (tmp_path / 'out' / file).read_bytes().decode(), file


# --- usage errors of every command

CONFIG = str(ROOT / 'launch/configs/digits_cpu.yaml')
ABBREVIATIONS = {
    'FIVE': [shipped_logs() / 'digits_five'],
    'ONE': [shipped_logs() / 'digits_sweep/1x1'],
    'PREDICT': ['predict', 'dgxa100_ngc20.06_mxnet', '--layouts'],
    'SWEEP': ['sweep', '--study', 'x', '--config', CONFIG, '--layouts'],
    'KUBERNETES': shlex.split(
        'launch kubernetes --image x --config '
        f'{shlex.quote(CONFIG)} --volume results:/results --nodes'
    ),
    'NINES': [f'1x{"9" * 5000}'],
    'LONG': ['a' * 256],
    'BROKEN': ['x\ny'],
}
# Words of a command, and text of its message.
USAGE_ERRORS = """
-x => -x: unknown option; see mlperf-rn50 --help
--version=1 => --version: ignored explicit argument
--degub report => --degub: unknown option; did you mean --debug?
raport => raport: unknown command; did you mean report?; expected one of
export => RUN|WEIGHTS, --format {onnx,gluon}: missing; for example: mlperf-rn50 export logs/
bench => {train,data,allreduce,ops}: missing; see mlperf-rn50 bench --help
-v => -v: unknown option; did you mean --version?
report x --price 3 => --price: unknown option; did you mean --price-per-node-hour?
report published/2.0/del => no such published sets; did you mean published/v2.0/Dell?
train --config CONFIG --run.dir= => run.dir: got an empty path, expected a folder
train CONFIG => CONFIG: unexpected argument; did you mean --config CONFIG?
report x --fromat csv => --fromat: unknown option; did you mean --format?
report x --rows runs => --rows: got --format text, expected --format csv
report x --price-per-node-hour 0 => expected a number above 0 and at most 1e9
report x --price-per-node-hour nan => expected a number above 0 and at most 1e9
report x --price-per-node-hour free => expected a number above 0 and at most 1e9
train --train.local_batch_siz=8 => did you mean --train.local_batch_size?
train --data data/digits/train.rec => --data: got a section, expected a key of it
train --config CONFIG --schedule={} => --schedule: got a section, expected a key of it
train --resume model=x => model=x: no such file or folder
train --resume '' => --resume: got an empty string, expected a value
train --config '' => --config: got an empty string, expected a value
launch local --run-dir '' --config CONFIG => --run-dir: got an empty string, expected a value
launch slurm --container '' --config CONFIG => --container: got an empty string, expected
train --config CONFIG --run.reference "['']" --dry-run => run.reference: got an empty path
train --config HOME --dry-run => data.dir: got
doctor --config CONFIG --resume x => --resume, --config: got both, expected one
train --config CONFIG --ranks 0 --dry-run => --ranks: got 0, expected a whole number, 1 or more
bench train --ranks 2 => --ranks: got 2, expected at most 1
bench train --steps 0 => --steps: got 0, expected 1 or more
bench allreduce => ranks: got 1, expected 2 or more
bench ops --batch-sizes 8,32 => --batch-sizes: got 8,32, expected one number for bench ops
bench data --inputs real => --inputs: got bench data, expected bench train
bench ops --precisions float16 => --precisions: got float16 on a CPU
bench data --train.global_batch_size 64 => train.global_batch_size: got 64, expected --batch-sizes
prepare imagenet --source / --out x --name y => --name: got y with imagenet
prepare digits --source / --out x => --source: got / with digits
bench data --models vgg16 => --models: got bench data, expected bench train
bench data --data.synthetic true => data.synthetic: got true, expected false
bench data --threads 1025 => --threads: got 1025, expected whole numbers from 1 to 1,024
bench data --node-images-per-s -1 => got -1, expected a number above 0
bench data --data.dir none => none/manifest.json: no such file; create the data with
bench ops --model.name vgg16 => model.name: got vgg16, expected a ResNet
why LONG => File name too long; correct the path
prepare folder --source / --out x --name BROKEN => --name: got 'x\\ny', expected printable text
prepare folder --source / --out BROKEN => --out: got 'x\\ny', expected printable text
launch apptainer --config CONFIG => --image: got nothing, expected an Apptainer image
launch apptainer --image none.sif => --image: none.sif does not exist; build it with
launch local --seeds 0 => --seeds: got 0, expected a whole number, 1 or more
launch local --nodes => --nodes: expected one argument; see mlperf-rn50 launch local --help
launch local --config CONFIG --train.max_epoch 1 => --train.max_epoch: unknown option; did you mean
launch local --config CONFIG --ranks-per-nodes 2 => unknown option; did you mean --ranks-per-node?
launch mpirun --config CONFIG --host h1 => --host: unknown option; did you mean --hosts?
launch mpi => invalid choice: 'mpi' (choose from 'local', 'mpirun',
launch kubernetes --image x => --volume CLAIM:PATH
KUBERNETES 3 => train.global_batch_size: got 64, expected a multiple of 3
launch ranks 2 => PROGRAM: missing
launch ranks 0 true => RANKS: got 0, expected a whole number, 1 or more
sweep --study x => launch/configs/c4140_v100_1node.yaml; see mlperf-rn50 sweep --help
SWEEP 1x1 --study ../x => --study: got '../x', expected a name
SWEEP ' ' => --layouts: got nothing
SWEEP 1x => expected nodes x ranks, such as 2x4
SWEEP 1x1 --lr-table /no => --lr-table: /no
SWEEP 1x1 --schedule.base_lr=1 => --schedule.base_lr: layouts have different values
SWEEP 1x1 --run-dir x => --run-dir: not allowed in a sweep
package runs --org us => --system SYSTEM, --out DIR: missing
package --check x --org us => --check: got --org too, expected only a finished tree
package --check x => x: no such file or folder; expected the tree of an organisation
package --check / => --check: / contains no results folder
package FIVE ONE --org us --system x --out o => RUNS: got 2 sets
predict => SOURCE: missing
predict nvidia => nvidia: not a file, folder
predict published/v2.0/Dell => got v2.0/Dell, which names 11 published systems, expected one of
PREDICT NINES => 1x9
PREDICT ' ' => --layouts
PREDICT 1x8 --weak --strong => --strong
PREDICT 1x8 --out '' => --out
PREDICT 1x8 --link-gbit-s nan => nan
PREDICT 1x8 --what-if '' => --what-if
PREDICT 1x8 --what-if 'link=25 port=2' => unknown field `port`; expected any of link=GBIT_S
PREDICT 1x8 --what-if link=nan => $.l
PREDICT 1x8 --what-if link=0 => $.l
PREDICT 1x8 --what-if link => $.l
PREDICT 1x8 --what-if local=1.5 => $.l
PREDICT 1x8 --what-if ' ' => expected changes such as link=25, each once
PREDICT 1x8 --what-if 'link=25 link=2' => expected changes such as link=25, each once
PREDICT 1x8 --what-if generation= => expected changes such as link=25, each once
PREDICT 1x8 --what-if tcp=false => expected changes such as link=25, each once
PREDICT 1x8 --what-if link=x => Expected `float | null`
predict --validate --layouts 1x2 => --layouts
prepare => got no data set and no --out DIR, expected a data set and --out, or --verify DIR
prepare digits --verify x => --verify: got a data set too
prepare --verify x --skip-corrupt => --verify: got --skip-corrupt too
prepare --verify x => x: no such file or folder; expected a folder written by prepare
prepare --verify / => --verify: / has no manifest.json; expected a folder written by prepare
prepare imagenet --source / --out x --validation 0.1 => --validation: got 0.1 with imagenet
prepare im2rec --source / --out x --skip-corrupt => --resize-shorter or --skip-corrupt, expected
prepare im2rec --source / --out x --resize-shorter 8 => --resize-shorter or --skip-corrupt, expected
watch => RUN_FOLDER
watch x --format json => --format json: got no --once
watch x --every 0 => --every: got 0, expected
watch x --every nan => --every: got nan
watch x --price-per-node-hour -1 => got -1, expected a number
"""


@pytest.mark.parametrize('case', USAGE_ERRORS.strip().splitlines())
def test_usage_error_is_one_line(case, tmp_path):
    words, message = case.split(' => ')
    (tmp_path / 'c.yaml').write_text('data: {dir: "~\\0"}\n')  # no user has such a name
    words = words.replace('HOME', str(tmp_path / 'c.yaml'))
    words = shlex.split(words.replace('CONFIG', shlex.quote(CONFIG)))
    message = message.replace('CONFIG', CONFIG)
    done = call(*(w for word in words for w in ABBREVIATIONS.get(word, [word])))
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert message in done.stderr and len(done.stderr) < 500
    assert done.stderr.startswith('mlperf-rn50: ') and done.stderr.count('\n') == 1
