"""Choice of GPUs and nodes of 10,000 ranks, which each rank computes for all."""
from dataclasses import replace

import pytest

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.gpus import View, choose_gpus
from mlperf_rn50.train.loop import RankPlace
from mlperf_rn50.train.run import nodes_of

NUM_HOSTS, RANKS_PER_HOST = 1250, 8
NUM_RANKS = NUM_HOSTS * RANKS_PER_HOST


class Name(str):
    """Name that counts comparisons with other names."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Name.num_compared += 1
        return str.__eq__(self, other)


@pytest.fixture(autouse=True)
def count_from_zero(monkeypatch):
    monkeypatch.setattr(Name, 'num_compared', 0)


def test_gpus_of_many_ranks_are_chosen_with_few_comparisons():
    views = [View(f'n{host}', tuple(Name(f'GPU-{host}-{i}') for i in range(RANKS_PER_HOST)))
             for host in range(NUM_HOSTS) for _ in range(RANKS_PER_HOST)]
    assert choose_gpus(views, 1) == [*range(RANKS_PER_HOST)] * NUM_HOSTS
    views[-1] = replace(views[-1], uuids=views[0].uuids[:1])
    with pytest.raises(ConfigError, match='ranks 0, 9999 on n0, n1249 all use GPU GPU-0-0 '):
        choose_gpus(views, 1)
    assert Name.num_compared < 1000 * NUM_RANKS


def test_many_ranks_are_assigned_to_nodes_with_few_comparisons():
    # As received, the names are different objects.
    hosts = [RankPlace(Name(f'n{r // RANKS_PER_HOST}'), 0, RANKS_PER_HOST, '') for r in range(NUM_RANKS)]
    assert nodes_of(hosts) == [r // RANKS_PER_HOST for r in range(NUM_RANKS)]
    assert Name.num_compared < 10 * NUM_RANKS
