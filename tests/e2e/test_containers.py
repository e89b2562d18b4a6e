"""docker.sh, apptainer.sh, slurm.sbatch with Pyxis, and mps.sh, with stand-ins for missing
programs."""

import os
from dataclasses import replace

import pytest
from helpers import ROOT, call, run, write_files

from mlperf_rn50.launch.engines import ENGINES

DIGITS = ROOT / 'launch/configs/digits_cpu.yaml'
RECORD_CALL = 'echo "$(basename "$0") $*" >>"$LOG"'


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Function that puts a shell program first in PATH; the program may use $LOG."""
    monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
    monkeypatch.setenv('LOG', str(tmp_path / 'log'))

    def make(name, body=RECORD_CALL):
        write_files(tmp_path / 'bin', {name: f'#!/usr/bin/env bash\n{body}'}, mode=0o755)

    return make


def called(tmp_path):
    """Return the recorded calls of the stand-ins."""
    return (tmp_path / 'log').read_text().splitlines()


@pytest.mark.parametrize(
    'engine, gpu', [('docker', '--gpus all'), ('podman', '--device nvidia.com/gpu=all')]
)
def test_docker_sh_passes_gpus_folders_and_environment(
    stand_in, tmp_path, monkeypatch, engine, gpu
):
    stand_in(engine)
    stand_in('nvidia-smi', '')
    monkeypatch.setenv('MLPERF_RN50_DOCKER', engine)
    monkeypatch.setenv('NCCL_DEBUG', 'WARN')
    data = tmp_path / 'data'
    data.mkdir()
    words = f'--image rn50:x --mount {data} --config c.yaml --seeds 2'
    done = run([ROOT / 'launch/docker.sh', *words.split()], cwd=tmp_path)
    [line] = called(tmp_path)
    assert done.returncode == 0, done.stderr
    assert line.startswith(f'{engine} run --rm --network host ')
    for part in (
        gpu,
        '--ulimit memlock=-1',
        '--stop-timeout 630',
        f'--mount type=bind,source={tmp_path},target={tmp_path} ',
        f'--mount type=bind,source={data},target={data} ',
        f'--user {os.getuid()}:{os.getgid()}',
        '--env NCCL_DEBUG',
    ):
        assert part in line
    assert line.endswith(
        '--entrypoint /opt/mlperf_rn50/launch/local.sh rn50:x --config c.yaml --seeds 2'
    )


def test_docker_sh_without_gpu_requests_none(stand_in, tmp_path, monkeypatch):
    stand_in('docker')
    monkeypatch.setenv('MLPERF_RN50_DOCKER', 'docker')
    assert run([ROOT / 'launch/docker.sh', '--config', 'c.yaml'], cwd=tmp_path).returncode == 0
    [line] = called(tmp_path)
    assert '--gpus' not in line and ' mlperf_rn50:cpu --config' in line


@pytest.mark.parametrize(
    'words, message',
    [('--mount /nowhere', 'got /nowhere, expected a'), ('--image', 'a value is missing')],
)
def test_docker_sh_usage_errors(words, message):
    done = run([ROOT / 'launch/docker.sh', *words.split()])
    option = words.split()[0]
    assert done.returncode == 2 and f'{option}: {message}' in done.stderr


@pytest.mark.slow
def test_apptainer_sh_runs_every_rank_in_the_image(stand_in, digits, tmp_path):
    # Runs the command after the image argument, from this checkout.
    stand_in(
        'apptainer',
        f'''{RECORD_CALL}
while [ "$1" != "{tmp_path}/rn50.sif" ]; do shift; done
shift
for word; do set -- "$@" "${{word/#\\/opt\\/mlperf_rn50/{ROOT}}}"; shift; done
exec "$@"''',
    )
    (tmp_path / 'rn50.sif').touch()
    words = (
        f'--image {tmp_path}/rn50.sif --config {DIGITS} --data.dir {digits} '
        f'--run-dir {tmp_path}/run --ranks-per-node 2 --model.name resnet18 '
        '--train.target_accuracy 0.01'
    )
    done = run([ROOT / 'launch/apptainer.sh', *words.split()])
    assert done.returncode == 0, done.stderr
    # the trial of Open MPI's settings, if any
    lines = [line for line in called(tmp_path) if 'try_mpi.py' not in line]
    assert len(lines) == 4  # two ranks of the doctor and two of the training
    here = os.getcwd()
    expected = (
        f'apptainer exec --bind {here} --bind {ROOT} --pwd {here} {tmp_path}/rn50.sif '
        '/opt/mlperf_rn50/launch/bind.sh /opt/mlperf_rn50/.venv/bin/mlperf-rn50 '
    )
    assert all(expected in line for line in lines)


def test_slurm_with_pyxis_runs_every_rank_in_the_image(stand_in, tmp_path):
    stand_in('srun')
    stand_in('scontrol', 'echo n1; echo n2')
    words = (
        f'--container registry#rn50:cu117 --config {DIGITS} --no-doctor --run-dir {tmp_path}/run '
        '--ranks-per-node 2'
    )
    slurm = {'SUBMIT_DIR': str(ROOT), 'JOB_NUM_NODES': '2', 'JOB_ID': '7', 'JOB_NODELIST': 'n[1-2]'}
    env = {**os.environ, **{f'SLURM_{name}': value for name, value in slurm.items()}}
    done = run(['bash', ROOT / 'launch/slurm.sbatch', *words.split()], cwd=ROOT, env=env)
    [line] = called(tmp_path)
    assert line.startswith(
        'srun --mpi=pmix --nodes 2 --ntasks 4 --ntasks-per-node 2 --kill-on-bad-exit=1 '
        '--export=ALL '
        f'--container-image registry#rn50:cu117 --container-mounts {ROOT}:{ROOT} '
        f'--container-workdir {ROOT} /opt/mlperf_rn50/launch/bind.sh '
        '/opt/mlperf_rn50/.venv/bin/mlperf-rn50 train --config'
    ), done.stderr


# --- several ranks per GPU
# ----------------------------------------------------------------------------


def test_ranks_per_device_starts_mps_and_splits_the_threads(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv('CUDA_MPS_PIPE_DIRECTORY', str(tmp_path / 'mps'))
    stand_in('nvidia-smi', '')
    stand_in(
        'nvidia-cuda-mps-control',
        '''
if [ "${1:-}" = -d ]; then echo started >>"$LOG"; touch "$LOG.alive"; exit 0; fi
read -r word
[ -e "$LOG.alive" ] || exit 1
echo "$word" >>"$LOG"
[ "$word" != quit ] || rm "$LOG.alive"''',
    )
    # because the first to end ends the other
    both = 'until [ "$(grep -c "^100$" "$LOG")" = 2 ]; do sleep 0.05; done'
    rank = f'echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE >>"$LOG"; {both}; exit 2'
    program = [str(ROOT / 'launch/bind.sh'), 'sh', '-c', rank, 'sh']
    monkeypatch.setitem(ENGINES, 'local', replace(ENGINES['local'], get_program=lambda *_: program))
    words = (
        f'launch local --config {DIGITS} --run-dir {tmp_path}/run --train.device gpu '
        '--model.fused_bn_relu false --ranks-per-node 2 --ranks-per-device 2 --no-doctor'
    )
    done = call(*words.split())
    assert done.returncode == 2, done.stderr
    lines = [line for line in called(tmp_path) if line != 'get_server_list']
    assert lines == ['started', '100', '100', 'quit']
