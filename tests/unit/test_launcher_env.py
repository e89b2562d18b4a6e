"""Environment variables: numbers from launchers, one-line errors, and values of other programs."""

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CLI, ROOT, argv, assert_one_line, json_table, run, table, under_ranks, variables

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import launcher_env
from mlperf_rn50.system.launcher_env import (
    COMMAND,
    launched_local,
    launched_rank,
    launched_size,
    rank_name,
    settle_variables,
)

BIND = ROOT / 'launch/bind.sh'
CHECKPOINTS = Path('runs/checkpoints')
# Variables of a Slurm step on nodes with different and equal numbers of ranks.
UNEVEN = 'PMIX_RANK=1 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0'
SRUN = 'SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=3'

TASKS = 'SLURM_STEP_TASKS_PER_NODE'


def run_with(variables, *words):
    """Run a command with some variables in addition to those of the tests."""
    return run(words, env={**os.environ, **variables})


@pytest.mark.parametrize('text', ['', '1,2', '٣', '9' * 5000])
def test_variable_without_a_number_is_named(monkeypatch, text):
    for name, read in (
        ('OMPI_COMM_WORLD_RANK', launched_rank),
        ('PMI_SIZE', launched_size),
        ('OMPI_COMM_WORLD_LOCAL_RANK', launched_local),
    ):
        with monkeypatch.context() as m:
            m.setenv(name, text)
            with pytest.raises(ConfigError, match=f'{name}: got .* expected a whole number'):
                read()


@pytest.mark.parametrize(
    'typed, expected',
    [
        (
            r'launch/mpirun.sh --hosts h1\,h2 --config my\ c.yaml ',
            "launch/mpirun.sh --hosts h1,h2 --config 'my c.yaml' --resume",
        ),
        ('launch/local.sh --resume --run-dir x', 'launch/local.sh --run-dir x --resume'),
        (
            'launch/local.sh --resume=x/checkpoints_1/step_00000003 --restarts 3',
            'launch/local.sh --restarts 3 --resume runs/checkpoints',
        ),
        (
            'launch/ranks.sh 2 .venv/bin/mlperf-rn50 train --config c',
            'launch/ranks.sh 2 .venv/bin/mlperf-rn50 train --resume runs/checkpoints',
        ),
        (
            'launch/ranks.sh 2 mlperf-rn50 train --train.max_epochs 9 --resume=runs --elastic',
            'launch/ranks.sh 2 mlperf-rn50 train --resume runs/checkpoints --train.max_epochs 9 '
            '--elastic',
        ),
        (  # the configuration in the run folder has another number of ranks
            'launch/ranks.sh 3 mlperf-rn50 train --config c --elastic',
            'launch/ranks.sh 3 mlperf-rn50 train --resume runs/checkpoints --elastic',
        ),
        (
            'launch/ranks.sh 3 mlperf-rn50 --debug train --config c',
            'launch/ranks.sh 3 mlperf-rn50 train --resume runs/checkpoints',
        ),
    ],
)
def test_resume_command_is_that_of_the_user(monkeypatch, typed, expected):
    monkeypatch.setenv(COMMAND, typed)
    assert launcher_env.resume_command(CHECKPOINTS) == expected


def test_resume_command_without_a_launcher(monkeypatch):
    monkeypatch.delenv(COMMAND, raising=False)
    for prefix, num_ranks in (('', ''), ('mpirun -np 2 ', '2')):
        monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', num_ranks)
        expected = f'{prefix}mlperf-rn50 train --resume runs/checkpoints'
        assert launcher_env.resume_command(CHECKPOINTS) == expected


@pytest.mark.parametrize('num_local, hosts', [('2', ''), ('1', '--hosts HOSTS ')])
def test_command_for_an_older_run_names_it_because_launchers_resume_the_newest(
    monkeypatch, num_local, hosts
):
    monkeypatch.setenv(COMMAND, 'launch/local.sh --config c --resume')
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '2')
    monkeypatch.setenv('OMPI_COMM_WORLD_LOCAL_SIZE', num_local)
    assert launcher_env.resume_command(CHECKPOINTS, is_newest=False) == (
        f'launch/ranks.sh {hosts}{num_local} mlperf-rn50 train --resume runs/checkpoints'
    )


@pytest.mark.parametrize(
    'text',
    [
        'OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=2',
        'HOROVOD_LOCAL_RANK=1',
        f'{UNEVEN} {TASKS}=2,1 SLURM_LOCALID=1 SLURM_NODEID=1',
    ],
)
def test_binding_refuses_a_rank_beyond_those_of_its_node_in_one_line(text):
    done = run_with(variables(text), BIND, 'true')
    assert_one_line(done, 'rank on this node: got ')


def test_binding_names_a_missing_program_and_a_wrong_number_and_accepts_nested_threads():
    assert_one_line(run([BIND, 'no_such_program']), 'no_such_program: No such file')
    command = argv('{} -m mlperf_rn50.system.topology true train', sys.executable)
    done = run_with({'OMP_NUM_THREADS': '2,1'}, *command)
    assert done.returncode == 0 and ' 2 threads' in done.stderr, done.stderr
    done = run_with({'MLPERF_RN50_RANKS_PER_DEVICE': 'x'}, *command)
    assert_one_line(done, "MLPERF_RN50_RANKS_PER_DEVICE: got 'x'")


def test_line_of_a_rank_is_one_write_in_unbuffered_python():
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # each write is a message
    code = (
        'from mlperf_rn50.system.launcher_env import print_stderr; print_stderr("rank 0"); '
        'print_stderr("rank 1")'
    )
    assert subprocess.run([sys.executable, '-u', '-c', code], stderr=writer).returncode == 0
    assert [reader.recv(100), reader.recv(100)] == [b'rank 0\n', b'rank 1\n']


@pytest.mark.parametrize(
    'text, place',
    table(f"""
 | 0 None 0 1
OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 \
OMPI_COMM_WORLD_LOCAL_SIZE=2                              | 3 8 1 2
HOROVOD_RANK=6 HOROVOD_SIZE=8 HOROVOD_LOCAL_RANK=0 HOROVOD_LOCAL_SIZE=4 | 6 8 0 4
{SRUN}                                                    | 0 None 0 1
{SRUN} PMIX_RANK=7                                        | 7 8 3 4
{UNEVEN} {TASKS}=2,1 SLURM_NODEID=0 SLURM_LOCALID=1       | 1 3 1 2
{UNEVEN} {TASKS}=2,1 SLURM_NODEID=1                       | 1 3 0 1
{UNEVEN} {TASKS}=4(x2),3 SLURM_NODEID=1 SLURM_LOCALID=3   | 1 3 3 4
{UNEVEN} {TASKS}=4(x999999999),3 SLURM_NODEID=9           | 1 3 0 4
{UNEVEN} SLURM_LOCALID=1                                  | 1 3 1 2
"""),
)
def test_place_of_a_rank_by_launcher(monkeypatch, text, place):
    """Rank, number of ranks, and the same on its node. A program that is started by hand within a
    Slurm job has rank 0; the last rank is without the list of tasks."""
    for name in list(os.environ):
        if name.startswith(('OMPI_COMM_', 'PMI', 'MPI_LOCAL', 'HOROVOD_', 'SLURM_')):
            monkeypatch.delenv(name)
    for name, value in variables(text).items():
        monkeypatch.setenv(name, f' {value} ' if name == 'HOROVOD_RANK' else value)
    found = launched_rank(), launched_size(), *launched_local()
    assert ' '.join(map(str, found)) == place
    assert rank_name() == f'rank {found[0]} on {platform.node()}'


# --- variables of MXNet, DALI, Horovod and OpenMP


def settled(starts_ranks=False, **variables):
    settle_variables(variables, starts_ranks)
    return variables


@pytest.mark.parametrize(
    'text, threads',
    [
        ('2,1', '2'),
        ('4,3,2', '4'),
        (' 2', '2'),
        *((wrong, None) for wrong in ('', ' ', *'1.0 0 -3 all ,2 100000 99999999999'.split())),
    ],
)
def test_mxnet_gets_one_number_of_threads(text, threads):
    assert settled(OMP_NUM_THREADS=text).get('OMP_NUM_THREADS') == threads


@pytest.mark.parametrize(
    'name, good, bad',
    json_table("""
"MXNET_CPU_WORKER_NTHREADS"               | "1/ 2 /16/999"   | "2.0/0/-1/abc/0x2/100000/٣"
"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD" | "0/999"          | "-1/1.5/true/999999999"
"MXNET_KVSTORE_BIGARRAY_BOUND"            | "0/2147483647"   | "-1/9999999999"
"DMLC_ROLE"                               | "worker"         | "server"
"NNVM_EXEC_MATCH_RANGE"                   | "0/16"           | "abc"
"NNVM_AUTO_SEARCH_MATCH_RANGE"            | "0/1"            | "abc"
"DALI_EXEC2_NUM_THREADS"                  | "1/4"            | "0/abc"
"MXNET_OPTIMIZER_AGGREGATION_SIZE"        | "99999"          | "0"
"MXNET_EXEC_BULK_EXEC_TRAIN"              | "0/1/true/False" | "2/yes/on"
"MXNET_CUDNN_AUTOTUNE_DEFAULT"            | "0/1/2"          | "off"
"MXNET_GPU_WORKER_NTHREADS"               | "2"              | "two"
"MXNET_ENGINE_TYPE" | "NaiveEngine/ThreadedEngine/ThreadedEnginePerDevice" | "naive"
"HOROVOD_CYCLE_TIME"                      | "5/0.1/.5/5."    | "5ms/nan/-1/1,5/100000"
"HOROVOD_FUSION_THRESHOLD"                | "0/134217728"    | "64M/1e6"
"HOROVOD_CACHE_CAPACITY"                  | "0"              | "none"
"DALI_AFFINITY_MASK"                      | "0/0,1, 2"       | "abc/0-3/0,"
"DALI_MALLOC_POOL_THRESHOLD"              | "4096/64k"       | "big"
"GOMP_CPU_AFFINITY"                       | "0 3 1-2/0-7:2"  | "all/,"
"""),
)
def test_value_that_a_library_would_not_survive_is_refused(name, good, bad):
    for text in good.split('/'):
        assert settled(**{name: text}) == {name: text.strip()}
    assert settled(**{name: '  '}) == {}  # some libraries read an empty text as 0
    for text in bad.split('/'):
        with pytest.raises(ConfigError, match=f'^{name}: got .* expected .* unset it$'):
            settled(**{name: text})


def test_controller_of_horovod_is_that_of_the_program_that_started_the_rank():
    gloo = variables('HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo')
    address = {'HOROVOD_GLOO_RENDEZVOUS_ADDR': '10.0.0.1'}
    assert settled(**gloo) == settled(HOROVOD_CONTROLLER='', HOROVOD_CPU_OPERATIONS='abc') == {}
    assert settled(**gloo, **address) == {**gloo, **address}
    assert not gloo.keys() & settled(**gloo, **address, OMPI_COMM_WORLD_RANK='1')
    assert settled(HOROVOD_CPU_OPERATIONS='CCL') == {'HOROVOD_CPU_OPERATIONS': 'CCL'}


def test_launcher_forgets_the_ranks_of_an_outer_job():
    kept = variables(
        'HOROVOD_CYCLE_TIME=1 HOROVOD_GLOO_IFACE=ib0 OMPI_MCA_btl=tcp PMIX_MCA_gds=hash'
    )
    outer = variables(
        'HOROVOD_RANK=5 HOROVOD_SIZE=8 HOROVOD_LOCAL_RANK=1 HOROVOD_CROSS_SIZE=2 '
        'HOROVOD_GLOO_RENDEZVOUS_ADDR=x HOROVOD_CONTROLLER=gloo OMPI_COMM_WORLD_SIZE=8 '
        'OMPI_MCA_ess_base_jobid=1 OMPI_MCA_orte_hnp_uri=x PMI_RANK=1 PMIX_NAMESPACE=x'
    )
    assert settled(**kept, **outer, starts_ranks=True) == kept
    assert settled(**outer) == outer


@pytest.mark.parametrize(
    'words, code',
    [
        ([*CLI, 'classify', 'missing', 'x.png'], 2),
        ([BIND, sys.executable, '-c', 'import mxnet'], 0),
    ],
)
def test_documented_list_of_threads_reaches_no_import_of_mxnet(words, code):
    done = run_with({'OMP_NUM_THREADS': '2,1'}, *words)
    assert done.returncode == code and 'Invalid' not in done.stderr, done.stderr


def test_wrong_variable_ends_commands_with_mxnet_before_they_start_anything():
    wrong = {'MXNET_CPU_WORKER_NTHREADS': '2.0'}
    for command in (
        [*CLI, 'doctor'],
        [*CLI, 'train', '--config', 'x'],
        under_ranks(2, ['true']),
        [ROOT / 'launch/local.sh', '--config', 'x'],
        [BIND, 'true'],
    ):
        done = run_with(wrong, *command)
        assert_one_line(done, "MXNET_CPU_WORKER_NTHREADS: got '2.0' in the environment")
    assert run_with(wrong, *CLI, 'report', '--help').returncode == 0
    # reads no variable of MXNet
    assert 'missing' in run_with(wrong, *CLI, 'check', 'missing').stderr


def test_ranks_start_with_variables_of_another_job():
    code = 'import horovod.mxnet as hvd; hvd.init(); assert hvd.size() == 2'
    env = variables(
        'HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_RANK=7 '
        'HOROVOD_SIZE=9 OMPI_COMM_WORLD_SIZE=9 PMIX_RANK=7 OMP_NUM_THREADS=2,1'
    )
    done = run_with(env, *under_ranks(2, [sys.executable, '-c', code]))
    assert done.returncode == 0, done.stderr
