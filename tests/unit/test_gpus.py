"""Visible and chosen GPUs of a rank: CUDA_VISIBLE_DEVICES, one GPU per task, MIG, and unintended
sharing."""

from dataclasses import replace
from types import SimpleNamespace

import mxnet as mx
import pytest
from fake_nvml import FakeNvml
from helpers import json_table, write_files

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import gpus as gpus_module
from mlperf_rn50.system.gpus import (
    Gpu,
    View,
    all_bus_ids,
    choose_gpus,
    find_visible_gpus,
    linux_bus_id,
    make_view,
)
from mlperf_rn50.train.comm import device
from mlperf_rn50.train.options import TrainConfig


def gpu(number):
    uuid, bus_id = f'GPU-{"abcdef"[number]}{number}', f'0000:{number}b:00.0'
    return Gpu(uuid, 'A100', bus_id, '8.0', '535.129.03', 40 << 30)


@pytest.mark.parametrize(
    'visible, uuids',
    json_table("""
null       | "GPU-a0 GPU-b1 GPU-c2"
""         | ""
" 2 , 0"   | "GPU-c2 GPU-a0"
"0,-1,1"   | "GPU-a0"
"1,3,0"    | "GPU-b1"
"GPU-b1,0" | "GPU-b1 GPU-a0"
"MIG-c1"   | "MIG-c1"
"GPU-b,0"  | "GPU-b1 GPU-a0"
"GPU-,0"   | ""
"""),
)
def test_visible_devices_count_up_to_the_first_invalid_entry(monkeypatch, visible, uuids):
    monkeypatch.setattr(gpus_module, 'find_gpus', lambda: (FakeNvml(), list('abc')))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    gpus = find_visible_gpus()
    assert [g.uuid for g in gpus] == uuids.split()
    assert gpu(0) in gpus or 'GPU-a0' not in uuids
    assert all(g.bus_id == '0000:2b:00.0' for g in gpus if g.uuid == 'MIG-c1')


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    for gpus in ((None, []), (SimpleNamespace(), ['a handle NVML fails for'])):
        monkeypatch.setattr(gpus_module, 'find_gpus', lambda gpus=gpus: gpus)
        assert find_visible_gpus() == []
    assert [linux_bus_id(t) for t in ('00000001:3B:00.0', '[N/A]', '')] == ['0001:3b:00.0', '', '']


def views(*uuids_of_ranks, hosts=('h1',) * 9, visible=None):
    """Return views of ranks, each given as the UUIDs of the GPUs that it sees."""
    return [View(h, tuple(uuids.split()), visible) for h, uuids in zip(hosts, uuids_of_ranks)]


def numbered(*visible):
    """Return views of ranks on one host that see one GPU each, without facts from the driver."""
    return [make_view('h1', [], 1, v) for v in visible]


# uuids: the GPUs that each rank sees
@pytest.mark.parametrize(
    'uuids, per_device, numbers',
    json_table("""
["a b c d", "a b c d", "a b c d", "a b c d"] | 1 | [0, 1, 2, 3]
["a b", "a b", "a b", "a b"]   | 3 | [0, 0, 0, 1]
["a", "b", "c", "d"]           | 1 | [0, 0, 0, 0]     # one GPU per task, always number 0
["a", "a", "b", "b", "c"]      | 2 | [0, 0, 0, 0, 0]
["a", "b", "b", "c", "c"]      | 2 | [0, 0, 0, 0, 0]  # a later check refuses uneven nodes
["a b", "c d"]                 | 1 | [0, 0]           # a rank uses the first of its task
"""),
)
def test_ranks_divide_the_visible_gpus(uuids, per_device, numbers):
    assert choose_gpus(views(*uuids), per_device) == numbers


def test_gpus_are_divided_on_each_host_also_without_facts_from_the_driver():
    two_hosts = views('a b', 'a b', 'c d', 'c d', hosts=['h1', 'h1', 'h2', 'h2'])
    assert choose_gpus(two_hosts, 1) == [0, 1, 0, 1]
    assert choose_gpus(numbered('0', '1'), 1) == [0, 0]
    with pytest.raises(ConfigError, match='with 2 ranks on h1 that see 1 GPU; expected at least 2'):
        choose_gpus(numbered(None, None), 1)


# uuids: the GPUs that each rank sees
@pytest.mark.parametrize(
    'uuids, keys, per_device, message',
    json_table(r"""
["A", "A"] | {"visible": "0"} | 1 | "1 GPU .CUDA_VISIBLE_DEVICES=0.; all see A; expected at least 2"
["a b", "a b", "a b", "a b", "a b"] | {} | 2 | "see 2 GPUs; all see a, b; expected at least 3"
["a b", "a"]  | {} | 1 | "ranks 0, 1 on h1 all use GPU a .* expected 2, or a GPU for each"
["a", "a"]    | {"hosts": ["pod-0", "pod-1"]} | 1 | "ranks 0, 1 on pod-0, pod-1 all use GPU a"
["a", ""]     | {"visible": ""} | 1 | "rank 1 on h1 sees no GPU .CUDA_VISIBLE_DEVICES=.; make"
["a", "b", "a", "b"] | {} | 2 | "got 2, but ranks 0 and 2 on h1, which are not consecutive"
"""),
)
def test_unintended_sharing_is_refused(uuids, keys, per_device, message):
    with pytest.raises(ConfigError, match=message):
        choose_gpus(views(*uuids, **keys), per_device)


class Name(str):
    """Name of a GPU that counts the comparisons of all names."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Name.num_compared += 1
        return str.__eq__(self, other)


def test_gpus_of_10_000_ranks_are_chosen_with_few_comparisons():
    views = []
    for host in range(1250):
        views += [View(f'n{host}', tuple(Name(f'GPU-{host}-{i}') for i in range(8)))] * 8
    assert choose_gpus(views, 1) == [*range(8)] * 1250
    views[-1] = replace(views[-1], uuids=views[0].uuids[:1])
    with pytest.raises(ConfigError, match='ranks 0, 9999 on n0, n1249 all use GPU GPU-0-0 '):
        choose_gpus(views, 1)
    assert Name.num_compared < 1000 * len(views)


def instances(*cards, host='h1'):
    """Return views of ranks that each see one MIG instance, by the card of the instance."""
    return [View(host, (f'MIG-{host}-{rank}',), None, (card,)) for rank, card in enumerate(cards)]


def test_two_instances_of_a_card_are_refused_before_training():
    with pytest.raises(ConfigError) as e:
        choose_gpus(instances('0000:0b:00.0', '0000:1b:00.0', '0000:0b:00.0'), 1)
    assert 'ranks 0 and 2 on h1 use MIG-h1-0 and MIG-h1-2, two instances of the' in str(e.value)
    assert 'card 0000:0b:00.0, which NCCL refuses' in str(e.value)
    for allowed, per_device in (
        (instances(*'abc'), 1),
        (instances('', ''), 1),
        (instances(*'aabb'), 2),
        (instances('a') + instances('a', host='h2'), 1),
    ):
        assert choose_gpus(allowed, per_device) == [0] * len(allowed)
    with pytest.raises(ConfigError, match='ranks 0 and 2 on h1 use'):
        choose_gpus(instances(*'aaaa'), 2)


def test_variable_in_a_message_is_escaped_and_shortened():
    with pytest.raises(ConfigError) as e:
        choose_gpus(numbered(*['\x1b[2J0\n' + '0' * 100_000] * 2), 1)
    assert '\x1b' not in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 500


@pytest.mark.parametrize(
    'numbers, num_gpus, visible, uuids',
    json_table("""
[0]    | 1 | null    | ["GPU-a0"]
[]     | 2 | null    | ["number 0 of h1", "number 1 of h1"]
[]     | 1 | "3,1"   | ["number 3 of h1"]  # a GPU for each task, and no NVML
[]     | 1 | "GPU-a" | ["number 0 of h1"]
[0, 1] | 1 | null    | ["number 0 of h1"]  # CUDA reports a different number of GPUs
"""),
)
def test_without_uuids_devices_are_identified_by_number_and_host(numbers, num_gpus, visible, uuids):
    view = make_view('h1', [gpu(n) for n in numbers], num_gpus, visible)
    assert list(view.uuids) == uuids
    assert view.cards == (('0000:0b:00.0',) if uuids == ['GPU-a0'] else ())


def test_device_numbers_of_two_ranks_follow_from_the_views_of_both(monkeypatch):
    config = Config(train=TrainConfig(device='gpu'), run=RunConfig(ranks_per_device=1))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)

    def devices(visible, num_gpus):
        monkeypatch.setattr(mx.context, 'num_gpus', lambda: num_gpus)
        monkeypatch.setattr(device, 'find_visible_gpus', lambda: visible)
        comms = [SimpleNamespace(rank=r, gather_object=lambda own: [own] * 2) for r in range(2)]
        return [device.device_id_of(config, comm) for comm in comms]

    # the latter without facts from the driver
    assert devices([gpu(0), gpu(1)], 2) == devices([], 2) == [0, 1]
    for visible, num_gpus, message in (
        ([gpu(0)], 1, 'run.ranks_per_device: got 1 with 2 ranks'),
        ([], 0, 'train.device: got gpu, but MXNet finds no GPU'),
    ):
        with pytest.raises(ConfigError, match=f'^{message}'):
            devices(visible, num_gpus)
    assert device.device_id_of(Config(), SimpleNamespace()) is None


def test_cards_of_a_host_are_read_from_sys(tmp_path):
    folder = tmp_path / 'bus/pci/devices'
    for line in (
        '0000:3b:00.0 0x10de 0x030200',
        '0000:1a:00.0 0x10de 0x030000',
        '0000:3c:00.0 0x10de 0x068000',  # another device of the vendor
        '0000:5e:00.0 0x15b3 0x020700',
    ):
        name, vendor, kind = line.split()
        write_files(folder / name, {'vendor': vendor, 'class': kind})
    (folder / '0000:00:00.0').mkdir()
    assert all_bus_ids(tmp_path) == ['0000:1a:00.0', '0000:3b:00.0']
