"""The command line before any command does its work: what is misspelt is answered in one line."""
import pytest
from helpers import call

from mlperf_rn50 import __version__
from mlperf_rn50.cli import command_names


@pytest.mark.parametrize('words, said', [
    (['-x'], '-x: unknown option; see mlperf-rn50 --help'),
    (['--degub', 'report'], '--degub: unknown option; did you mean --debug?'),
    (['--version=1'], 'argument --version: ignored explicit argument'),
    (['raport'], 'raport: unknown command; did you mean report?; expected one of'),
    (['report'], 'PATH: missing; see mlperf-rn50 report --help'),
    (['export'], 'RUN|WEIGHTS, --format {onnx,gluon}: missing; see mlperf-rn50 export --help'),
    (['bench'], '{train,data,allreduce,ops}: missing; see'), (['evaluate'], 'RUN|WEIGHTS: missing; see'),
    (['report', 'x', '--fromat', 'csv'], '--fromat: unknown option; did you mean --format?'),
    (['report', 'x', '--format', 'pdf'], "invalid choice: 'pdf'"),
    (['train', '--train.local_batch_siz=8'], 'did you mean --train.local_batch_size?'),
    (['bench', 'trian'], "invalid choice: 'trian'")])
def test_mistakes_are_one_line(words, said):
    done = call(*words)
    assert (done.returncode, done.stdout) == (2, '')
    assert said in done.stderr and done.stderr.startswith('mlperf-rn50: ') and done.stderr.count('\n') == 1


def test_the_help_lists_every_command_with_its_line():
    done = call('--help')
    assert call('help').stdout == done.stdout and call('help', 'check').stdout == call('check', '--help').stdout
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and {'train', 'bench', 'report'} < set(command_names())
    for name in command_names():
        [line] = [x for x in lines if x.startswith(f'  {name} ')]
        assert line.endswith('.') and len(line) > 30


def test_nothing_asked_for_is_a_mistake_that_gets_the_help():
    done = call()
    assert (done.returncode, done.stdout, done.stderr) == (2, '', call('--help').stdout)


@pytest.mark.parametrize('name', command_names())
def test_the_help_of_a_command_has_its_line_and_examples(name):
    done = call(name, '--help')
    assert done.returncode == 0 and f'examples:\n  mlperf-rn50 {name}' in done.stdout
    assert f'usage: mlperf-rn50 {name} ' in done.stdout


def test_the_version_names_the_stack():
    first, packages, system, processor = call('--version').stdout.splitlines()
    assert first.startswith(f'mlperf-rn50 {__version__}') and system.startswith('Python 3.11.')
    assert all(f'{name} ' in packages for name in ('MXNet', 'DALI', 'Horovod', 'Open MPI')) and ', ' in processor


def test_debug_shows_the_traceback():
    assert 'Traceback' in call('--debug', 'report', '/nonexistent').stderr
    assert 'Traceback' not in call('report', '/nonexistent').stderr


def test_the_help_of_a_key_says_what_it_takes():
    text = ' '.join(call('train', '--help').stdout.split())
    assert 'Expected: a fraction such as 0.749, not per cent, in fraction.' in text
    assert 'Expected: a number above 0, in buckets.' in text
