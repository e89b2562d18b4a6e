"""docker.sh, apptainer.sh, slurm.sbatch with Pyxis, and mps.sh, with stand-ins for missing
programs."""

import os
import re
import resource
from dataclasses import replace

import pytest
from helpers import ROOT, argv, call, run, write_files

from mlperf_rn50.launch import attempts
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
    'engine, gpu', [('docker', '--gpus all'), ('podman', '--device nvidia.com/gpu=all'), ('a', '')]
)
def test_docker_sh_passes_gpus_folders_and_environment(
    stand_in, tmp_path, monkeypatch, engine, gpu
):
    stand_in(engine)
    if gpu:
        stand_in('nvidia-smi', '')
    monkeypatch.setenv('MLPERF_RN50_DOCKER', engine)
    monkeypatch.setenv('NCCL_DEBUG', 'WARN')
    data = tmp_path / 'data'
    (tmp_path / 'real').mkdir()
    data.symlink_to('real')
    words = argv('{} --mount {} --config c.yaml --seeds 2', ROOT / 'launch/docker.sh', data)
    done = run(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, digest, line = called(tmp_path)
    assert digest.startswith(f'{engine} image inspect ') and '--env MLPERF_RN50_IMAGE=' in line
    assert line.startswith(f'{engine} run --rm --network host ')
    for text in (
        *(gpu, '--stop-timeout 630', '--env NCCL_DEBUG'),
        *(f'--mount type=bind,source={folder},target={folder} ' for folder in (tmp_path, data)),
        f'--user {os.getuid()}:{os.getgid()}',
    ):
        assert text in line
    # podman without root keeps the limit of this user
    is_limited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY
    is_kept = engine == 'podman' and os.getuid() != 0 and is_limited
    assert ('--ulimit memlock=-1' in line) == (bool(gpu) and not is_kept)
    assert gpu or not re.search('--gpus|--device', line)
    start = '--entrypoint /opt/mlperf_rn50/launch/local.sh mlperf_rn50:cpu'
    assert line.endswith(f'{start} --config c.yaml --seeds 2')


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--mount', '/nowhere'], '--mount: got /nowhere, expected a'),
        (['--image'], '--image: a value is missing'),
    ],
)
def test_docker_sh_usage_errors(arguments, message):
    done = run([ROOT / 'launch/docker.sh', *arguments])
    assert done.returncode == 2 and message in done.stderr


def test_docker_sh_takes_another_image(stand_in, tmp_path, monkeypatch):
    stand_in('docker')
    monkeypatch.setenv('MLPERF_RN50_DOCKER', 'docker')
    run([ROOT / 'launch/docker.sh', '--image', 'rn50:x'], cwd=tmp_path)
    assert called(tmp_path)[-1].endswith('local.sh rn50:x')


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
    done = run(
        argv(
            '{} --image {} --config {} --data.dir {} --run-dir {} --ranks-per-node 2 '
            '--model.name resnet18 --train.target_accuracy 0.01',
            ROOT / 'launch/apptainer.sh',
            tmp_path / 'rn50.sif',
            DIGITS,
            digits,
            tmp_path / 'run',
        )
    )
    assert done.returncode == 0, done.stderr
    # the trial of Open MPI's settings, if any
    lines = [line for line in called(tmp_path) if 'try_mpi.py' not in line]
    assert len(lines) == 4  # two ranks of the doctor and two of the training
    assert all(
        f'apptainer exec --bind {os.getcwd()} --bind {ROOT} --pwd {os.getcwd()} '
        f'{tmp_path}/rn50.sif '
        '/opt/mlperf_rn50/launch/bind.sh /opt/mlperf_rn50/.venv/bin/mlperf-rn50 ' in line
        for line in lines
    )


def test_slurm_with_pyxis_runs_every_rank_in_the_image(stand_in, tmp_path):
    stand_in('srun')
    stand_in('scontrol', 'echo n1; echo n2')
    done = run(
        argv(
            'bash {} --container registry#rn50:cu117 --config {} --no-doctor --run-dir '
            '{} --ranks-per-node 2',
            ROOT / 'launch/slurm.sbatch',
            DIGITS,
            tmp_path / 'run',
        ),
        cwd=ROOT,
        env={
            **os.environ,
            'SLURM_SUBMIT_DIR': str(ROOT),
            'SLURM_JOB_NUM_NODES': '2',
            'SLURM_JOB_ID': '7',
            'SLURM_JOB_NODELIST': 'n[1-2]',
        },
    )
    [line] = called(tmp_path)
    assert line.startswith(
        'srun --mpi=pmix --nodes 2 --ntasks 4 --ntasks-per-node 2 --kill-on-bad-exit=1 '
        '--quit-on-interrupt --export=ALL '
        f'--container-image registry#rn50:cu117 --container-mounts {ROOT}:{ROOT} '
        f'--container-workdir {ROOT} /opt/mlperf_rn50/launch/bind.sh '
        '/opt/mlperf_rn50/.venv/bin/mlperf-rn50 train --config'
    ), done.stderr


# --- several ranks per GPU


@pytest.mark.parametrize(
    'option, restarts, device, start',
    [
        ('--ranks-per-device', '', 'gpu', 'started 100 100 quit'),
        ('--run.ranks_per_device', '--restarts 1', 'gpu', 'started 100 100 quit'),
        ('--ranks-per-device', '--restarts 1', 'cpu', '100 100'),
    ],
)
def test_each_start_of_ranks_that_share_a_gpu_has_its_own_mps_and_splits_the_threads(
    stand_in, tmp_path, monkeypatch, option, restarts, device, start
):
    monkeypatch.setenv('CUDA_MPS_PIPE_DIRECTORY', str(tmp_path / 'mps'))
    stand_in('nvidia-smi', '')
    stand_in(
        'nvidia-cuda-mps-control',
        '''
if [ "${1:-}" = -d ]; then echo started >>"$LOG"; touch "$LOG.alive"; exit 0; fi
read -r word _
[ -e "$LOG.alive" ] || exit 1
echo "$word" >>"$LOG"
[ "$word" != quit ] || rm "$LOG.alive"''',
    )
    # because the first to end ends the other
    both = 'until [ "$(wc -l <"$of_job")" = 2 ]; do sleep 0.05; done'
    share = 'echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE | tee -a "$of_job" >>"$LOG"'
    rank = f'of_job=$LOG.$MLPERF_RN50_JOB; {share}; {both}; exit 3'
    program = [str(ROOT / 'launch/bind.sh'), 'sh', '-c', rank, 'sh']
    monkeypatch.setattr(attempts, '_FIRST_PAUSE_S', 0.1)
    monkeypatch.setitem(ENGINES, 'local', replace(ENGINES['local'], get_program=lambda *_: program))
    done = call(
        *argv(
            'launch local --config {} --run-dir {} --train.device {} '
            '--model.fused_bn_relu false --ranks-per-node 2 {} 2 --no-doctor',
            DIGITS,
            tmp_path / 'run',
            device,
            option,
        ),
        *restarts.split(),
    )
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr
    lines = [line for line in called(tmp_path) if line not in ('get_server_list', '')]
    assert lines == start.split() * (2 if restarts else 1)
