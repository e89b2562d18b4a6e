"""Set-up of a rank before it runs a command."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import own_signals

from mlperf_rn50.cli import ranks as _ranks
from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.gpu_env import NVIDIA_VARIABLE, SET_VARIABLE, SETTINGS
from mlperf_rn50.train.comm.horovod import check_controller
from mlperf_rn50.train.options import TrainConfig


@pytest.mark.parametrize('given, threads', [(None, '1'), ('', '1'), ('many', '1'), ('3,2', '3')])
def test_threads_follow_the_quota_unless_set(monkeypatch, given, threads):
    monkeypatch.setattr(_ranks, 'find_limits', lambda: GroupLimits(quota_cpus=1.5))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(64)))
    # in_rank sets it too, and monkeypatch restores it
    monkeypatch.setenv('HOROVOD_CYCLE_TIME', '5')
    monkeypatch.delenv('OMP_NUM_THREADS') if given is None else monkeypatch.setenv(
        'OMP_NUM_THREADS', given
    )
    seen = []
    with own_signals():
        assert (
            _ranks.in_rank(lambda _: seen.append(os.environ['OMP_NUM_THREADS']) or 0, Config()) == 0
        )
    assert seen == [threads]


@pytest.mark.parametrize(
    'device, expected',
    [('gpu', {**SETTINGS, SET_VARIABLE: ','.join(SETTINGS)}), ('cpu', {'HOROVOD_CYCLE_TIME': '5'})],
)
def test_settings_for_gpus_need_no_launcher(monkeypatch, device, expected):
    names = {*SETTINGS, SET_VARIABLE, NVIDIA_VARIABLE}
    monkeypatch.setattr(os, 'environ', {k: v for k, v in os.environ.items() if k not in names})
    with own_signals():
        assert (
            _ranks.in_rank(
                lambda _: 0, Config(train=TrainConfig(device=device, local_batch_size=1))
            )
            == 0
        )
    assert {k: v for k, v in os.environ.items() if k in names} == expected


def test_packages_that_no_rank_uses_are_not_imported_with_mxnet():
    code = """if True:
        import sys
        from mlperf_rn50.cli.ranks import in_rank
        from mlperf_rn50.config import Config
        def program(_):
            import mxnet
            return int(any(sys.modules.get(name) for name in ("sklearn", "scipy")))
        assert in_rank(program, Config()) == 0
        import sklearn.datasets"""
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize(
    'env, has_mpi, has_gloo, message',
    [
        (
            {'HOROVOD_CONTROLLER': 'gloo'},
            True,
            False,
            'built without Gloo; start the ranks with launch/mpirun.sh',
        ),
        (
            {'OMPI_COMM_WORLD_SIZE': '2', 'PMIX_NAMESPACE': '1'},
            False,
            True,
            'built without MPI; use launch/horovodrun.sh',
        ),
    ],
)
def test_missing_controller_of_horovod_is_named(env, has_mpi, has_gloo, message):
    with pytest.raises(ConfigError, match=message):
        check_controller(env, has_mpi, has_gloo)
    check_controller(env, True, True)
    check_controller({}, False, False)  # a single process uses neither
    check_controller({'HOROVOD_CONTROLLER': 'gloo'}, False, True)


@pytest.mark.parametrize(
    'name, others',
    [
        ('OMPI_COMM_WORLD_SIZE', {'PMIX_NAMESPACE': '1'}),
        ('HOROVOD_SIZE', {'HOROVOD_GLOO_RENDEZVOUS_ADDR': 'h1'}),
    ],
)
def test_number_of_ranks_that_an_earlier_launcher_left_is_refused(name, others):
    with pytest.raises(
        ConfigError, match=f"{name}: got '2' in the environment without a launcher; unset it"
    ):
        check_controller({name: '2'}, True, True)
    check_controller({name: '2', **others}, True, True)


@pytest.mark.parametrize(
    'body, last, code',
    [
        ('time.sleep(1.5)', 'time.sleep(600)', -signal.SIGABRT),
        ('time.sleep(600)', 'time.sleep(0.5)', 0),
        ('None', 'threading.Thread(target=time.sleep, args=(4,)).start()', 0),
    ],
)
def test_rank_ends_if_the_thread_of_horovod_has_ended(body, last, code):
    """Not if this process ends first, which ends the thread, too, also while another thread still
    writes."""
    program = f"""if True:
        import sys, threading, time
        from mlperf_rn50.train.comm import horovod
        horovod._LOST_S = 0.1
        thread = threading.Thread(target=lambda: {body}, daemon=True)
        thread.start()
        threading.Thread(target=horovod.end_without, args=(str(thread.native_id),), daemon=True).start()
        {last}"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.returncode == code
    assert ('thread of Horovod that exchanges gradients has ended' in done.stderr) == bool(code)
