"""launch/setup.sh, with stand-ins for Python, pip, uv and the compilers that record calls and
install nothing."""

import os
import re
import shutil
import signal
import sys

import pytest
from helpers import HANG_LIMIT_S, ROOT, git, run, start_program, wait_for

COPIED = """setup.sh test.sh demo.sh lint.sh setup_ngc.sh setup_machine.sh
    build_horovod.sh engines/program.sh check_setup.py set_rpaths.py requirements.lock
    requirements_ngc.lock""".split()
TOOLS = """bash cat chmod cp cut dirname find flock grep head ldd ln mkdir mktemp mv nproc rm sed
    sha256sum sleep sort tail touch""".split()
# A Python 3.11 and a uv whose installers record the call and then run the shell code of the test in
# ON_INSTALL. The check is the real one, on packages that are stand-ins.
PYTHON = f"""
packages=.venv/lib/python3.11/site-packages
add() {{ mkdir -p "$packages/$1"; echo "$2" >"$packages/$1/__init__.py"; }}
case "$*" in
    *version_info*) echo "$0" ;;
    '-m venv .venv')
        mkdir -p .venv/bin $packages/nvidia/nccl/lib
        add mxnet '__version__ = 1'; add nvidia ''; add nvidia/dali '__version__ = 2'
        cp "$0" .venv/bin/python; cp "$0" .venv/bin/uv ;;
    '-m pip '* | 'pip '*)
        words=${{*:2}} words=${{words#pip }} words=${{words#--disable-pip-version-check }}
        echo "$words" >>"$CALLS"
        case $words in
            *-e*)
                printf '%s\\n' "${{SHEBANG-#!/.venv/bin/python}}" 'import sys' \\
                    >.venv/bin/mlperf-rn50 ;;
            *reinstall*)
                add horovod '__version__ = 3'
                built='mpi_built = gloo_built = lambda: True'
                add horovod/mxnet "$built; nccl_built = cuda_built = int" ;;
            wheel*)
                [[ $words =~ -w.([^ ]+) ]]
                echo all >"${{BASH_REMATCH[1]}}/horovod-0.28.1.whl" ;;
        esac
        eval "$ON_INSTALL" ;;
    'launch/check_setup.py '*) PYTHONPATH=$packages exec {sys._base_executable} -S -B "$@" ;;
esac
"""
CHECKED = 'all libraries resolve; MXNet 1, DALI 2, Horovod 3 with MPI+Gloo import'
DOWNLOAD = (
    'downloads up to 1.0 GB{} minutes on two fast cores, and up to 20 on slow ones or a '
    'slow network'
)
STEPS = [
    DOWNLOAD.format(' and builds Horovod, which takes 2 to 3'),
    'step 1 of 4, the Python environment',
    'step 2 of 4, the packages',
    'step 3 of 4, Horovod',
    'step 4 of 4, the checks',
    'done',
]
WITH_WHEEL = [DOWNLOAD.format(', which takes 1 to 2'), *STEPS[2:]]
WHEEL = (
    'mlperf_rn50/horovod-0.28.1-mxnet-1.9.1-openmpi-4.1.8-cpython-311-x86_64-linux-gnu/'
    'horovod-0.28.1.whl'
)


def program(path, text=''):
    """Write a shell program, replacing a link at the path."""
    path.unlink(missing_ok=True)
    path.write_text(f'#!{shutil.which("bash")}\n{text}')
    path.chmod(0o755)


def make_checkout(folder):
    """Create a checkout with scripts only, without .venv."""
    (folder / 'launch/engines').mkdir(parents=True)
    shutil.copy(ROOT / 'setup.cfg', folder)
    for name in COPIED:
        shutil.copy(ROOT / 'launch' / name, folder / 'launch' / name)
    return folder


@pytest.fixture
def ready(tmp_path):
    """Checkout with everything that a set-up requires; the bin folder next to it, the PATH, has
    only basic tools."""
    for name in ('bin', 'tmp', 'home'):
        (tmp_path / name).mkdir()
    for name in TOOLS:
        (tmp_path / 'bin' / name).symlink_to(shutil.which(name))
    for name in ('python3.11', 'g++', 'make'):
        program(tmp_path / 'bin' / name, PYTHON)
    return make_checkout(tmp_path / 'checkout')


def start(checkout, *words, **variables):
    at = checkout.parent
    env = {'PATH': at / 'bin', 'HOME': at / 'home', 'TMPDIR': at / 'tmp', 'CALLS': at / 'calls'}
    env |= {'ON_INSTALL': '', **variables}
    given = {name: str(value) for name, value in env.items() if value is not None}
    return start_program([checkout / 'launch/setup.sh', *words], env=given)


def end(process, checkout):
    """Wait for a set-up; return the exit code, the output, and the progress lines without times."""
    out, err = process.communicate(timeout=HANG_LIMIT_S)
    assert list((checkout.parent / 'tmp').iterdir()) == []
    progress = re.findall(r'^setting up \.venv \(\w+\): (.*) \(\d+:\d\d\)$', err, re.MULTILINE)
    return process.returncode, out + err, progress


def setup(checkout, *words, **variables):
    return end(start(checkout, *words, **variables), checkout)


def calls_of(checkout):
    """Return the arguments of the pip calls since the previous query."""
    calls = checkout.parent / 'calls'
    recorded = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return recorded


def num_builds(calls):
    """Return how many times the wheel of Horovod was built."""
    return sum(call.startswith('wheel') for call in calls)


def changed(checkout, code):
    """Run shell code beside the checkout; return the checkout, which the code may move."""
    assert run(['bash', '-c', code], cwd=checkout.parent).returncode == 0
    [settings] = checkout.parent.glob('*/setup.cfg')
    return settings.parent


def with_nvcc(release):
    """Return shell code for changed() that adds the nvcc of a CUDA toolkit."""
    answer = f'echo "Cuda compilation tools, release {release}, V{release}.89"'
    return f"echo '{answer}' >bin/nvcc; chmod +x bin/nvcc"


def files(folder):
    return [str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file()]


@pytest.mark.slow
def test_repeated_real_setup_changes_nothing():
    done = run([ROOT / 'launch/setup.sh'])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_git_never_converts_line_ends(tmp_path):
    git(tmp_path, 'init', '--quiet')
    shutil.copy(ROOT / '.gitattributes', tmp_path)
    for name in ('launch/setup.sh', 'tests/logs/carriage_returns/result_0.txt', 'docs/setup.md'):
        assert git(tmp_path, 'check-attr', 'text', name).strip() == f'{name}: text: unset'


@pytest.mark.parametrize('script', COPIED[:4])
def test_scripts_ignore_cdpath(tmp_path, script):
    checkout, other = make_checkout(tmp_path / 'own'), make_checkout(tmp_path / 'other')
    is_setup = script == 'setup.sh'
    for folder in (checkout, other):
        (folder / '.venv/bin').mkdir(parents=True)
        for name in ('.venv/bin/python', '.venv/bin/ruff', *['launch/setup.sh'][is_setup:]):
            program(folder / name, 'echo "$0 in $PWD" >&2; exit 3\n')
    done = run(
        ['bash', f'launch/{script}', *['--check'][:is_setup]],
        cwd=checkout,
        env={'PATH': os.environ['PATH'], 'CDPATH': str(other)},
    )
    assert str(other) not in done.stderr
    assert f'in {checkout}' in done.stderr


def test_help_and_check_report_without_setting_up(ready):
    assert setup(ready, '--help')[1].startswith('Sets up .venv with pinned packages')
    assert '.venv is missing; run launch/setup.sh' in setup(ready, '--check')[1]
    setup(ready)
    assert setup(ready, '--check') == (0, f'{CHECKED}\n', [])
    mxnet = ready / '.venv/lib/python3.11/site-packages/mxnet'
    (mxnet / '__init__.py').write_text('raise ImportError("libfoo")')
    code, output, _ = setup(ready, '--check')
    assert code == 2 and 'libfoo' in output and 'DALI does not import; remove .venv' in output
    shutil.rmtree(mxnet)
    code, output, _ = setup(ready, '--check')
    assert code == 2 and output == 'launch/setup.sh: .venv is unfinished; run launch/setup.sh\n'


def need(message, change='', *words, **variables):
    return pytest.param(message, change, words, variables, id=message)


@pytest.mark.parametrize(
    'message, change, words, variables',
    [
        need('got --chekc, expected --check, --help', '', '--chekc'),
        need('got cu999, expected cpu, cu112, cu117 or ngc', MLPERF_RN50_VARIANT='cu999'),
        need('cannot create a folder in /none; set TMPDIR to another folder', TMPDIR='/none'),
        need(
            'got no python3 in PATH with mxnet, horovod and',
            'ln -s /bin/false bin/python3',
            MLPERF_RN50_VARIANT='ngc',
        ),
        need('python3.11 is missing', 'ln -sf /bin/false bin/python3.11'),
        need(
            'uv cannot make a virtual environment with Python 3.11',
            'rm bin/python3.11; ln -s /bin/false bin/uv',
        ),
        need(
            'apt-get install python3.11-venv',
            """echo '[ "$1" = -c ] && echo "$0"' >bin/python3.11""",
        ),
        need(
            "missing, which Horovod's build needs; install both (Debian, Ubuntu: apt-get",
            'rm bin/g++',
        ),
        need(
            "nvcc: got none, expected that of CUDA 11, which Horovod's build needs; set HOROVOD_",
            MLPERF_RN50_VARIANT='cu117',
            HOROVOD_CUDA_HOME='/none',
        ),
        need(
            'nvcc: got that of CUDA 12, expected that of CUDA 11',
            with_nvcc('12.4'),
            MLPERF_RN50_VARIANT='cu117',
            CUDACXX='nvcc',
        ),
        need('set XDG_CACHE_HOME to another folder', XDG_CACHE_HOME='/dev/null'),
        *(need('move the checkout', f"mv checkout $'{name}'") for name in ('a\\nb', 'a:b', 'a$b')),
        need('is not writable, but .venv is created there; use', 'mkdir checkout/.venv.lock'),
    ],
)
def test_missing_requirements_are_reported_before_downloads(
    ready, message, change, words, variables
):
    code, output, steps = setup(changed(ready, change), *words, **variables)
    assert code == 2 and message in output, output
    assert output.count('\n') == len(steps) + 1 and not calls_of(ready)


def test_uv_is_used_without_python_of_the_version(ready):
    tools = ready.parent / 'bin'
    (tools / 'python3.11').rename(ready.parent / 'from_uv')
    # like pyenv's shim
    program(tools / 'python3.11', 'echo "python3.11: no such version here" >&2; exit 127')
    program(tools / 'uv', f'echo "uv $*" >>"$CALLS"; exec {ready.parent / "from_uv"} -m venv .venv')
    assert setup(ready)[2] == STEPS
    assert calls_of(ready)[0] == 'uv venv --quiet --seed --python 3.11 .venv'


def test_only_steps_are_printed_and_a_complete_setup_is_silent(ready):
    _, output, steps = setup(ready, ON_INSTALL='echo "WARNING: pip configuration" >&2')
    assert steps == STEPS
    assert re.findall('^(?!setting up).+', output, re.MULTILINE) == [CHECKED]
    calls = calls_of(ready)
    assert num_builds(calls) == 1 and any(' -e .[cpu,demo,export,test] ' in c for c in calls)
    (ready / '.venv.lock').unlink()
    assert setup(ready) == (0, '', []) and calls_of(ready) == []
    assert not (ready / '.venv.lock').exists()  # a complete set-up writes nothing


@pytest.mark.parametrize(
    'what, log, message',
    [('*-e*', 'install', 'uv failed'), ('wheel*', 'horovod', 'Horovod did not build')],
)
def test_failed_step_shows_last_lines_and_next_setup_resumes_there(ready, what, log, message):
    fails = f'[[ $words != {what} ]] || {{ echo "fatal error"; exit 1; }}'
    code, output, _ = setup(ready, ON_INSTALL=fails)
    path = ready / f'.venv/.setup/{log}.log'
    assert code == 1 and 'fatal error' in path.read_text()
    assert output.endswith(f'fatal error\nlaunch/setup.sh: {message}; the complete log is {path}\n')
    (ready / '.venv/kept').touch()
    code, _, steps = setup(ready)
    assert code == 0 and steps == [STEPS[0], *STEPS[2:]] and (ready / '.venv/kept').exists()


def test_changes_and_reverted_changes_do_not_rebuild_horovod(ready):
    setup(ready)
    (ready.parent / 'bin/g++').unlink()  # required only for a build
    for changed in ('launch/requirements.lock', 'setup.cfg'):
        with (ready / changed).open('a') as file:
            file.write('\n# changed\n')
        calls_of(ready)
        assert setup(ready)[2] == WITH_WHEEL
        assert not num_builds(calls_of(ready))


def test_setups_add_packages_to_those_of_earlier_ones(ready):
    few = {'MLPERF_RN50_EXTRAS': 'demo'}
    code, output, _ = setup(ready, **few, ON_INSTALL='[[ $words != *--reinstall* ]] || exit 1')
    assert code == 1 and 'downloads up to 0.8 GB' in output
    assert setup(ready, **few)[0] == 0 and any('.[cpu,demo]' in call for call in calls_of(ready))
    assert setup(ready)[0] == 0
    assert any('.[cpu,demo,export,test]' in call for call in calls_of(ready))
    assert setup(ready, **few) == (0, '', []) and setup(ready) == (0, '', [])


def test_horovod_is_built_without_debug_information(ready):
    program(ready.parent / 'bin/cmake', 'echo "$@" >>"$CALLS.cmake"')
    build = (
        '[[ $words != wheel* ]] || { "$HOROVOD_CMAKE" source -DA=1; "$HOROVOD_CMAKE" --build .; }'
    )
    assert setup(ready, ON_INSTALL=build)[0] == 0
    assert (ready.parent / 'calls.cmake').read_text() == (
        'source -DA=1 -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -DNDEBUG\n--build .\n'
    )


def test_variables_of_modules_do_not_reach_the_build(ready):
    names = 'CCL_ROOT', 'HOROVOD_CPU_OPERATIONS', 'HOROVOD_GPU_OPERATIONS', 'HOROVOD_CUDA_HOME'
    shown = ''.join(f'${{{name}-unset}} ' for name in names)
    record = f'[[ $words != wheel* ]] || echo {shown} >>"$CALLS.variables"'
    modules = {**dict.fromkeys(names, 'CCL'), 'HOROVOD_CUDA_HOME': ''}
    assert setup(ready, ON_INSTALL=record, **modules)[0] == 0
    assert (ready.parent / 'calls.variables').read_text() == 'unset unset unset unset\n'


@pytest.mark.parametrize('other', ['', with_nvcc('12.4')], ids=['none', 'CUDA 12'])
def test_gpu_variant_has_no_horovod_until_nvcc_of_cuda_11_is_there(ready, other):
    tools = ready.parent / 'bin'
    changed(ready, other)
    (tools / 'g++').rename(ready.parent / 'g++')  # only a build needs it
    code, _, steps = setup(ready, MLPERF_RN50_VARIANT='cu117')
    assert code == 0 and not any('horovod' in call for call in calls_of(ready))
    assert steps[0].startswith('nvcc of CUDA 11 is missing, so Horovod is not built, and one rank')
    assert (setup(ready)[1], setup(ready, '--check')[0]) == ('', 0)
    (ready.parent / 'g++').rename(tools / 'g++')
    changed(ready, with_nvcc('11.8'))
    code, _, steps = setup(ready)
    assert code == 0 and steps[-3:] == STEPS[-3:] and num_builds(calls_of(ready)) == 1
    (tools / 'nvcc').unlink()
    assert setup(ready)[1] == ''


@pytest.mark.parametrize(
    'change, variant, reason',
    [
        ('mv checkout moved', 'cpu', 'it was created at '),
        ('ln -sf /nowhere/python3.11 checkout/.venv/bin/python', 'cpu', 'its Python is missing'),
        ('rm checkout/.venv/.setup/made', 'cpu', 'it is unfinished or from an older set-up'),
        (with_nvcc('11.8'), 'cu117', 'it is for cpu'),
    ],
)
def test_unusable_venv_is_created_again(ready, change, variant, reason):
    setup(ready)
    (ready / '.venv/old').touch()
    checkout = changed(ready, change)
    code, _, steps = setup(checkout, MLPERF_RN50_VARIANT=variant)
    assert code == 0 and steps[1].startswith(f'.venv is created again because {reason}')
    assert not (checkout / '.venv/old').exists()
    assert setup(checkout) == (0, '', [])  # .venv keeps the variant as its default


def test_setup_works_without_home_and_without_file_locks(ready):
    program(ready.parent / 'bin/flock', 'exit 66')
    # for pip
    checks = '[ "$XDG_CACHE_HOME" = "$PWD/.venv/.cache" ] || exit 1'
    code, _, steps = setup(ready, HOME=None, ON_INSTALL=checks)
    assert code == 0 and steps == STEPS and files(ready / '.venv/.cache') == [WHEEL]


# The first part is what pip prints; a value may have several lines.
CONFIGURATION = r"""[[ $words != 'config list' ]] || cat <<'END'
:env:.index-url='https://by.variable/simple'
global.extra-index-url='https://a/simple\nhttps://b/simple'
global.index-url='https://by.file/simple'
global.find-links='/x\n/y'
global.no-index='true'
global.user='true'
install.cert='/site.pem'
install.no-deps='yes'
END
export -p | sed -nE 's/^declare -x ((PYTHON|PIP_|UV_|SSL_).*)/\1/p' | sort >"$CALLS.${words%% *}"
"""


def test_modules_and_pip_configuration_change_only_where_packages_come_from(ready):
    names = """PYTHONPATH PYTHONHOME PYTHONUSERBASE PIP_TARGET PIP_PREFIX PIP_CONSTRAINT
        PIP_NO_DEPS UV_CONSTRAINT""".split()
    given = {**dict.fromkeys(names, '/module'), 'PIP_CERT': '/user.pem'}
    assert setup(ready, **given, ON_INSTALL=CONFIGURATION)[0] == 0
    for command in ('install', 'wheel'):
        assert (
            (ready.parent / f'calls.{command}').read_text()
            == """\
PIP_CERT="/site.pem"
PIP_CONFIG_FILE="/dev/null"
PIP_EXTRA_INDEX_URL="https://a/simple https://b/simple"
PIP_FIND_LINKS="/x /y"
PIP_INDEX_URL="https://by.variable/simple"
PIP_NO_INDEX="true"
PYTHONNOUSERSITE="1"
SSL_CERT_FILE="/site.pem"
UV_COMPILE_BYTECODE="1"
UV_DEFAULT_INDEX="https://by.variable/simple"
UV_FIND_LINKS="/x,/y"
UV_INDEX="https://a/simple https://b/simple"
UV_INDEX_STRATEGY="unsafe-best-match"
UV_NO_CONFIG="1"
UV_SYSTEM_CERTS="1"
"""
        )
    by_uv = [call for call in calls_of(ready) if '--python .venv/bin/python' in call]
    assert len(by_uv) == 2 and all(' --no-index ' in call for call in by_uv)


@pytest.mark.parametrize(
    'shebang, changed',
    [
        ('#!/a b/.venv/bin/python3.11', '#!/a b/.venv/bin/python3.11 -E'),
        # pip's form for long paths
        (
            "#!/bin/sh\n'''exec' \"/a b/.venv/bin/python3.11\" \"$0\" \"$@\"\n' '''",
            "#!/bin/sh\n'''exec' \"/a b/.venv/bin/python3.11\" -E \"$0\" \"$@\"\n' '''",
        ),
    ],
)
def test_program_in_venv_ignores_variables_of_python(ready, shebang, changed):
    setup(ready, SHEBANG=shebang)
    assert (ready / '.venv/bin/mlperf-rn50').read_text() == f'{changed}\nimport sys\n'


# The packages, or the build with a child process, wait until the test removes or creates a file.
WAIT_AT_PACKAGES = """[[ $words != *-e* ]] || { touch "$CALLS.busy"
while [ -e "$CALLS.busy" ]; do sleep 0.1; done; }"""
WAIT_AT_BUILD = """[[ $words != wheel* ]] || { touch "$TMPDIR/object.o"
sleep 9000 & touch "$CALLS.busy"
until [ -e "$CALLS.fail" ]; do sleep 0.1; done; exit 1; }"""


def start_busy(checkout, on_install):
    """Start a set-up and wait until its pip waits."""
    process = start(checkout, ON_INSTALL=on_install)
    wait_for(
        (checkout.parent / 'calls.busy').exists,
        lambda: process.poll() is None,
        lambda: process.communicate(),
    )
    return process


def test_second_setup_waits_for_the_first_and_changes_nothing(ready):
    first = start_busy(ready, WAIT_AT_PACKAGES)
    second = start(ready)
    assert f'waiting for another set-up, process {first.pid} on ' in second.stderr.readline()
    (ready.parent / 'calls.busy').unlink()
    first.communicate(timeout=HANG_LIMIT_S)
    assert first.returncode == 0 and end(second, ready) == (0, '', [])
    calls = calls_of(ready)
    assert len(calls) == len(set(calls))


@pytest.mark.parametrize(
    'how, code', [('the build fails', 1), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_interrupted_setup_leaves_no_processes_and_no_files(ready, how, code):
    process = start_busy(ready, WAIT_AT_BUILD)
    if how == 'the build fails':
        (ready.parent / 'calls.fail').touch()
    else:
        process.send_signal(how)
    ended, output, _ = end(process, ready)
    is_interrupted = 'stopped; run launch/setup.sh again to resume' in output
    assert (ended, is_interrupted) == (code, code > 1), output
    # All processes have the lock; killed ones may still hold it for a moment.
    assert run(['flock', '--wait', HANG_LIMIT_S // 2, ready / '.venv.lock', 'true']).returncode == 0
    assert files(ready.parent / 'home') == []
    assert setup(ready)[2] == [STEPS[0], *STEPS[2:]]
    assert files(ready.parent / 'home/.cache') == [WHEEL]
