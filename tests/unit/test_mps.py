"""launch/mps.sh: start, stop and folder of the MPS service, with stand-ins for NVIDIA's
programs."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, assert_one_line, run, skip_for, write_programs

SCRIPT = ROOT / 'launch/mps.sh'
# Appends its calls to the file CALLS, and acts as a service once started.
CONTROL = """if [ "$1" = -d ]; then
    echo "start in $CUDA_MPS_PIPE_DIRECTORY, log in $CUDA_MPS_LOG_DIRECTORY" >>"$CALLS"
    env | grep -E '^CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|MPS_ACTIVE_THREAD_PERCENTAGE)=' >>"$CALLS"
    (exec >&- 2>&-; sleep 0.5; : >"$CUDA_MPS_PIPE_DIRECTORY/control") & # answers later
else
    read -r request
    [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
    case $request in
        get_server_list) echo 7 ;;
        get_client_list*) echo "${CLIENT:-}" ;;
        quit*) echo "$request" >>"$CALLS"; rm "$CUDA_MPS_PIPE_DIRECTORY/control" ;;
    esac
fi
"""


@pytest.fixture
def environment(tmp_path):
    """Environment with a GPU, and a service folder that does not exist yet."""
    programs = tmp_path / 'bin'
    write_programs(programs, **{'nvidia-smi': '', 'nvidia-cuda-mps-control': CONTROL})
    return {
        'PATH': f'{programs}:{os.environ["PATH"]}',
        'CALLS': str(tmp_path / 'calls'),
        'CUDA_MPS_PIPE_DIRECTORY': str(tmp_path / 'mps'),
    }


def calls(environment) -> list[str]:
    return Path(environment['CALLS']).read_text().splitlines()


def test_service_is_started_once_in_a_private_folder(environment):
    folder = Path(environment['CUDA_MPS_PIPE_DIRECTORY'])
    starts = [
        subprocess.Popen([SCRIPT, 'start'], env=environment, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [p.wait(HANG_LIMIT_S) for p in starts] == [0] * 4, [p.stderr.read() for p in starts]
    assert calls(environment) == [f'start in {folder}, log in {folder}/log']
    assert (folder / 'control').exists()  # start has waited until the service answers
    assert folder.stat().st_mode & 0o7777 == 0o700
    assert run([SCRIPT, 'stop'], env=environment).returncode == 0
    assert calls(environment)[1:] == ['quit -t 10']


@pytest.mark.parametrize('job, is_stopped', [('5-ab-2', True), ('6-cd-1', False)])
def test_service_with_clients_of_another_launcher_is_left_running(environment, job, is_stopped):
    run([SCRIPT, 'start'], env=environment)
    sleep = ['sleep', str(HANG_LIMIT_S)]
    client = subprocess.Popen(sleep, env=environment | {'MLPERF_RN50_JOB': job})
    stop = environment | {'CLIENT': str(client.pid), 'MLPERF_RN50_JOB': '5-ab-m'}
    try:
        assert run([SCRIPT, 'stop'], env=stop).returncode == 0
        assert ('quit -t 10' in calls(environment)) == is_stopped
    finally:
        client.kill()  # it then has no variables, until wait()
    assert run([SCRIPT, 'stop'], env=stop).returncode == 0 and 'quit -t 10' in calls(environment)
    client.wait()


@pytest.mark.parametrize(
    'visible, kept', [('GPU-6f1c', []), ('MIG-8a2d', ['CUDA_VISIBLE_DEVICES=MIG-8a2d'])]
)
def test_service_ignores_the_limits_of_the_starting_rank(environment, visible, kept):
    environment |= {
        'CUDA_VISIBLE_DEVICES': visible,
        'CUDA_DEVICE_ORDER': 'PCI_BUS_ID',
        'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE': '25',
    }
    assert run([SCRIPT, 'start'], env=environment).returncode == 0
    assert sorted(calls(environment)[1:]) == ['CUDA_DEVICE_ORDER=PCI_BUS_ID', *kept]


def contents(folder: Path) -> dict:
    return {p: p.read_bytes() if p.is_file() else b'' for p in folder.rglob('*')}


def planted_link(folder: Path) -> str:
    (folder.parent / 'target').mkdir(mode=0o700)
    (folder.parent / 'target/lock').write_text('precious')
    folder.symlink_to(folder.parent / 'target')
    return 'got symbolic link, owner'


def writable_by_all(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return f'got a folder, owner {os.geteuid()}, mode 777'


def owned_by_another(folder: Path) -> str:
    skip_for('' if os.geteuid() == 0 else 'only root can change the owner of a folder')
    folder.mkdir(mode=0o700)
    os.chown(folder, 4242, 4242)
    return 'owner 4242, mode 700'


@pytest.mark.parametrize(
    'plant, slash',
    [(planted_link, ''), (planted_link, '//'), (writable_by_all, ''), (owned_by_another, '')],
)
def test_untrusted_folder_is_refused_and_unchanged(environment, plant, slash):
    folder = Path(environment['CUDA_MPS_PIPE_DIRECTORY'])
    problem = plant(folder)
    environment['CUDA_MPS_PIPE_DIRECTORY'] += slash
    before = contents(folder.parent)
    for command in ('start', 'stop'):
        done = run([SCRIPT, command], env=environment)
        assert_one_line(done, problem, 'set CUDA_MPS_PIPE_DIRECTORY')
    assert contents(folder.parent) == before  # without calls


def test_missing_program_is_named_and_nothing_is_started_without_a_gpu(environment, tmp_path):
    assert 'Usage: launch/mps.sh start|stop|folder' in run([SCRIPT], env=environment).stderr
    # one per user
    default_folder = run([SCRIPT, 'folder'], env={'PATH': environment['PATH']}).stdout
    assert default_folder == f'/tmp/mlperf_rn50-mps-{os.geteuid()}\n'
    (tmp_path / 'bin/nvidia-cuda-mps-control').unlink()
    done = run([SCRIPT, 'start'], env=environment | {'HOSTNAME': 'of.another.host'})
    assert_one_line(done, f'nvidia-cuda-mps-control is missing on {os.uname().nodename};')
    write_programs(tmp_path / 'bin', **{'nvidia-smi': 'exit 9'})
    for command in ('stop', 'start'):
        assert run([SCRIPT, command], env=environment).returncode == 0
    assert os.listdir(tmp_path) == ['bin']
