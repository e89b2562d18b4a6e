"""Ranks that share a GPU: stages and sets of their exchanges, and their places."""

import sys
from types import SimpleNamespace

import pytest
from helpers import json_table

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.comm import sharing
from mlperf_rn50.train.options import TrainConfig


@pytest.mark.parametrize(
    'num_ranks, num_sharing, expected',
    json_table("""
5 | 2 | ["01234", "01", "024", "23"]
4 | 1 | ["0123"]
2 | 2 | ["01"]
1 | 4 | ["0"]
"""),
)
def test_sets_of_ranks(num_ranks, num_sharing, expected):
    sets = sharing.find_sets(num_ranks, num_sharing)
    assert [''.join(map(str, ranks)) for ranks in sets] == expected


def test_stages_of_an_exchange_do_not_list_all_ranks():
    assert len(sharing.find_stages(5, 10**18, 1)[1]) == 10**18


def test_ranks_of_a_gpu_must_be_consecutive():
    for counts in ([4], [3], [4, 2], [2, 3]):
        sharing.check_places([(f'h{i}', r) for i, n in enumerate(counts) for r in range(n)], 2)
    message = (
        '^run.ranks_per_device: got 2, and ranks 2 and 3, which are to share a GPU, '
        'are number 2 on h0 and number 0 on h1; start a multiple of 2 ranks'
    )
    for places, match in (
        ([('h0', 0), ('h0', 1), ('h0', 2), ('h1', 0)], message),
        ([('h0', 0), ('h0', 2)], 'number 0 on h0 and number 2 on h0'),
    ):
        with pytest.raises(ConfigError, match=match):
            sharing.check_places(places, 2)


@pytest.mark.parametrize(
    'device, per_device, has_nccl, expected',
    json_table("""
"gpu" | 1 | true  | 1
"gpu" | 3 | true  | 3
"gpu" | 3 | false | 1
"cpu" | 3 | true  | 1
"""),
)
def test_sharing_ranks_sum_first_only_if_nccl_would_refuse(
    monkeypatch, device, per_device, has_nccl, expected
):
    hvd = SimpleNamespace(nccl_built=lambda: has_nccl)
    monkeypatch.setitem(sys.modules, 'horovod', SimpleNamespace(mxnet=hvd))
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', hvd)
    config = Config(train=TrainConfig(device=device), run=RunConfig(ranks_per_device=per_device))
    monkeypatch.setattr(sharing, 'launched_size', lambda: 6)
    assert sharing.sharing_of(config) == expected
    monkeypatch.setattr(sharing, 'launched_size', lambda: None)
    assert sharing.sharing_of(config) == 1


def test_doctor_describes_the_path_of_gradients():
    assert sharing.describe_exchange('MPI', 'gpu', 7, 2, True).endswith(
        'gradients of 2 ranks of a GPU through host memory and MPI, then of 4 GPUs through NCCL'
    )
