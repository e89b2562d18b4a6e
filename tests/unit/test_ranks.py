"""Set-up of a rank before it runs a command."""

import os
import subprocess
import sys

import pytest
from helpers import own_signals

from mlperf_rn50.cli import ranks
from mlperf_rn50.config import Config
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.gpu_env import NVIDIA_VARIABLE, SET_VARIABLE, SETTINGS
from mlperf_rn50.train.options import TrainConfig


@pytest.mark.parametrize('given, threads', [(None, '1'), ('', '1'), ('many', '1'), ('3,2', '3')])
def test_threads_follow_the_quota_unless_set(monkeypatch, given, threads):
    monkeypatch.setattr(ranks, 'find_limits', lambda: GroupLimits(quota_cpus=1.5))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(64)))
    # in_rank sets it too, and monkeypatch restores it
    monkeypatch.setenv('HOROVOD_CYCLE_TIME', '5')
    monkeypatch.setenv('OMP_NUM_THREADS', '')
    if given is None:
        monkeypatch.delenv('OMP_NUM_THREADS')
    else:
        monkeypatch.setenv('OMP_NUM_THREADS', given)
    seen = []
    with own_signals():
        ranks.in_rank(lambda _: seen.append(os.environ['OMP_NUM_THREADS']) or 0, Config())
    assert seen == [threads]


@pytest.mark.parametrize(
    'device, expected',
    [('gpu', {**SETTINGS, SET_VARIABLE: ','.join(SETTINGS)}), ('cpu', {'HOROVOD_CYCLE_TIME': '5'})],
)
def test_settings_for_gpus_need_no_launcher(monkeypatch, device, expected):
    names = {*SETTINGS, SET_VARIABLE, NVIDIA_VARIABLE}
    monkeypatch.setattr(os, 'environ', {k: v for k, v in os.environ.items() if k not in names})
    with own_signals():
        config = Config(train=TrainConfig(device=device, local_batch_size=1))
        assert ranks.in_rank(lambda _: 0, config) == 0
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
