"""The launch scripts: what is missing is named, and how to get it."""
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run

TOOLS = ('bash', 'env', 'cat', 'cut', 'dirname', 'sed', 'sha256sum', 'id', 'nproc', 'head', 'find')


@pytest.fixture
def bare(tmp_path):
    """A checkout without .venv, and a PATH with nothing but the usual small tools."""
    checkout, tools = tmp_path / 'checkout', tmp_path / 'bin'
    shutil.copytree(ROOT / 'launch', checkout / 'launch')
    shutil.copy(ROOT / 'setup.cfg', checkout)
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    return checkout, tools


def setup(checkout, tools, **variables):
    return run([checkout / 'launch/setup.sh'], env={'PATH': str(tools), 'HOME': str(checkout), **variables})


def test_a_missing_python_is_named(bare):
    done = setup(*bare)
    assert done.returncode == 2
    assert 'python3.11 is missing; install it (Debian 12: apt-get install python3.11' in done.stderr


def test_a_missing_compiler_is_named(bare):
    (bare[1] / 'python3.11').symlink_to(Path(sys.base_prefix) / 'bin/python3.11')
    done = setup(*bare)
    assert done.returncode == 2 and 'apt-get install g++ make' in done.stderr


def test_an_unknown_variant_is_named(bare):
    done = setup(*bare, MLPERF_RN50_VARIANT='cu999')
    assert done.returncode == 2 and 'got cu999, expected cpu, cu112 or cu117' in done.stderr


def test_a_repeated_setup_changes_nothing():
    done = run([ROOT / 'launch/setup.sh'])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.parametrize('arguments', [['2'], ['0', 'true'], []])
def test_usage_of_ranks(arguments):
    done = run([ROOT / 'launch/ranks.sh', *arguments])
    assert done.returncode == 2 and 'Usage: launch/ranks.sh RANKS' in done.stderr


@pytest.mark.parametrize('code', [0, 1, 75])
def test_ranks_hand_on_the_exit_code(code):
    assert run([ROOT / 'launch/ranks.sh', 2, 'sh', '-c', f'exit {code}']).returncode == code


def test_ranks_have_their_number_and_their_cores():
    said = run([ROOT / 'launch/ranks.sh', 2, 'sh', '-c',
                'echo $OMPI_COMM_WORLD_RANK $OMP_NUM_THREADS $DALI_AFFINITY_MASK']).stdout.splitlines()
    ranks = sorted(line.split() for line in said)
    assert [rank for rank, _, _ in ranks] == ['0', '1']
    assert all(int(num_threads) >= 1 for _, num_threads, _ in ranks)
    first, second = ({int(cpu) for cpu in cpus.split(',')} for _, _, cpus in ranks)
    assert first | second <= os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1


def test_bound_ranks_hold_back_the_word_to_stop_until_they_train():
    done = run([ROOT / 'launch/bind.sh', 'grep', 'SigBlk', '/proc/self/status'])
    assert int(done.stdout.split()[1], 16) == 1 << (signal.SIGUSR1 - 1), done.stderr


@pytest.mark.parametrize('when', ['before the engine', 'during the doctor', 'during training'])
def test_a_launcher_that_is_asked_to_stop_starts_nothing_more(tmp_path, when):
    launcher = tmp_path / 'launcher.sh'
    launcher.write_text(f"""source {ROOT}/launch/common.sh
        start_ranks() {{
            echo "$3"
            case {when!r}/$3 in
                'before the engine/'*) kill -USR1 $$; run_engine sleep 60 ;;
                'during the doctor/doctor' | 'during training/train') (sleep 1; kill -USR1 $$) & run_engine sleep 60 ;;
            esac
        }}
        launch "$@"
        """)
    done = run(['bash', launcher, '--config', ROOT / 'launch/configs/digits_cpu.yaml', '--run-dir', tmp_path / 'run'],
               timeout=40)
    assert done.returncode == 1, done.stderr
    assert done.stdout.split() == (['doctor', 'train'] if when == 'during training' else ['doctor'])
