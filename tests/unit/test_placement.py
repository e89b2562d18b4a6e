"""Placement of the ranks, and what this machine must have for them."""

import os
import resource
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import json_table, launch_options

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch import placement
from mlperf_rn50.launch.engines import ENGINES
from mlperf_rn50.launch.placement import (
    Placement,
    check_kept,
    check_machine,
    check_room,
    place_ranks,
)
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import Failure
from mlperf_rn50.train.options import TrainConfig

HERE = ('localhost',)


def refusal(match):
    """Return the expectation of an error, or of none."""
    return pytest.raises(ConfigError, match=match) if match else nullcontext()


@pytest.mark.parametrize(
    'script, hosts, ranks, device, expected',
    json_table("""
"local"  | ["localhost", "localhost"] | 9 | "cpu" | "got 2 nodes with 9 ranks, 18 on this machine"
"local"  | ["localhost"]       | 17 | "cpu" | "17 on this machine, which has 2 CPUs"
"local"  | ["localhost"]       | 16 | "cpu" | null
"mpirun" | ["localhost", "h2"] | 17 | "cpu" | "17 on this machine"
"mpirun" | ["h1", "h2"]        | 17 | "cpu" | null
"slurm"  | ["localhost"]       | 17 | "cpu" | null
"local"  | ["localhost"]       | 1  | "gpu" | null
"local --ranks-per-device 4" | ["localhost"] | 4 | "gpu" | null
"local"  | ["localhost"] | 8 | "gpu" | "has 1 GPU, expected 8; give other machines with --hosts"
"""),
)
def test_ranks_that_this_machine_cannot_bear_are_refused(
    monkeypatch, script, hosts, ranks, device, expected
):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1})
    monkeypatch.setattr(placement, 'all_bus_ids', lambda sys: ['0000:3b:00.0'])
    name, _, words = script.partition(' ')
    options = launch_options(words, script=name)
    place, config = Placement(None, tuple(hosts), ranks), Config(train=TrainConfig(device=device))
    for quota, text in ((None, expected), (0.5, 'has 1 CPU, expected at most 8 ranks per CPU')):
        limits = SimpleNamespace(quota_cpus=quota)
        monkeypatch.setattr(placement, 'find_limits', lambda limits=limits: limits)
        if not quota or expected and device == 'cpu':
            with refusal(text):
                check_machine(ENGINES[name], options, place, config)


@pytest.mark.parametrize('script, is_refused', [('mpirun', False), ('slurm', True)])
def test_limits_of_this_machine_hold_for_ranks_here_and_in_a_job(monkeypatch, script, is_refused):
    """Slurm gives them to the nodes, and ssh does not."""
    limit = {resource.RLIMIT_NOFILE: (300, 300)}
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: limit.get(kind, (-1, -1)))
    options = launch_options(script=script)
    with refusal('ulimit -n: got 300' if is_refused else ''):
        check_machine(ENGINES[script], options, Placement(None, ('h1', 'h2'), 99), Config())


@pytest.mark.parametrize(
    'folder, is_refused',
    [('/srv/logs/run', False), ('/my data/run', False), ('/tmp/run', True), ('/srvs', True)],
)
def test_run_folder_outside_of_the_mounts_of_a_container_is_refused(
    tmp_path, monkeypatch, folder, is_refused
):
    mounts = ['/', '/srv', '/my\\040data']
    lines = [f'2{k} 1 8:1 /home {point} rw - ext4 /dev/sda rw\n' for k, point in enumerate(mounts)]
    (tmp_path / 'mounts').write_text(''.join(lines))
    monkeypatch.setattr(placement, '_MOUNTS', tmp_path / 'mounts')
    check_kept(Path(folder))
    monkeypatch.setenv('MLPERF_RN50_IMAGE', 'sha256:1')
    with refusal('lost with the container' if is_refused else ''):
        check_kept(Path(folder))


FILE = RunConfig('/r', num_nodes=2, ranks_per_node=3)


# run: what differs from FILE
@pytest.mark.parametrize(
    'words, run, expected',
    json_table("""
"--config c"                         | {} | "localhost localhost 3"
"--config c --ranks-per-node 4"      | {} | "localhost localhost 4"
"--config c --nodes 1"               | {} | "localhost 3"
"--config c --hosts h1,h2,h3"        | {} | "h1 h2 3"
"--config c --hosts h1,h2,h3"        | {"num_nodes": null, "ranks_per_node": null} | "h1 h2 h3 1"
"--resume --run-dir /r"              | {"dir": "/before"} | "localhost localhost 3"
"--resume --run-dir /r --hosts h1"   | {} | "h1 3"
"--config c --hosts h1:4,h2:4"       | {} | "h1 h2 4"
"""),
)
def test_place_of_options_hosts_and_configuration(words, run, expected, monkeypatch):
    monkeypatch.setattr(placement, 'newest_run', lambda folder: RunFolder(folder, 0))
    run = replace(FILE, **run)
    place, config = place_ranks(ENGINES['mpirun'], launch_options(words), lambda words: Config(run))
    assert ' '.join(place.hosts) + f' {place.ranks_per_node}' == expected
    assert str(place.run_dir) == '/r' and config.run is run


@pytest.mark.parametrize(
    'words, message',
    [
        ('--config c --hosts h1', '--nodes: got 2 with 1 hosts'),
        ('--config c --hosts h1:4,h2:4 --ranks-per-node 2', 'h1: got 2 ranks, expected 4'),
        ('--resume', 'got no --run-dir'),
        ('', '--config: got nothing'),
        ('--config c --drill kill:rank6@step1', 'rank6@step1, expected a rank below 6'),
        ('--config c --drill link:rank3@step1', 'whose host localhost is not reached over ssh'),
    ],
)
def test_contradictory_places_are_refused(words, message):
    with refusal(message):
        place_ranks(ENGINES['mpirun'], launch_options(words), lambda words: Config(FILE))


def test_failures_have_the_host_names_of_the_user():
    place = Placement(None, ('10.0.0.1', '10.0.0.2', '10.0.0.3'), 2)
    assert place.ranks_of('10.0.0.2') == '2, 3'
    ranks = {None: 'n', 0: '10.0.0.1', 3: '10.0.0.2', 4: '10.0.0.3', 6: 'n'}
    assert {r: place.name_of(Failure('a', 'n', 'killed', r)) for r in ranks} == ranks


def test_host_at_fault_is_that_of_the_rank_for_which_others_wait():
    place = Placement(None, ('h1', 'h2'), 2)
    hosts = {None: 'h1', 3: 'h2', -1: ''}
    waiting = {r: Failure('a', 'h1', 'no progress', 0, late_rank=r) for r in hosts}
    assert {r: place.host_at_fault(f) for r, f in waiting.items()} == hosts


def test_missing_or_full_tmpdir_is_refused_although_another_folder_has_space(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'none'))
    for name in ('local', 'horovodrun'):
        with refusal(f'TMPDIR: {tmp_path}/none is not a writable folder'):
            check_room(ENGINES[name], 1)
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    free = {tmp_path: 0}
    monkeypatch.setattr(shutil, 'disk_usage', lambda p: SimpleNamespace(free=free.get(p, 10**9)))
    with refusal(f'TMPDIR: {tmp_path} has 0.0 MB free, expected 17 MB'):
        check_room(ENGINES['local'], 1)
    del free[tmp_path]
    check_room(ENGINES['local'], 1)


@pytest.mark.parametrize(
    'name, limit, num_ranks, expected',
    json_table("""
"files"     | 35       | 1   | "ulimit -n: got 35 open files, expected at least 36,"
"files"     | 36       | 1   | null
"files"     | 64       | 8   | null
"files"     | 63       | 8   | "got 63 open files, expected at least 64,"
"files"     | -1       | 999 | null
"bytes"     | 10240    | 1   | "ulimit -f: got 10 KiB per file, .* run ulimit -f unlimited"
"bytes"     | 16777216 | 1   | null
"processes" | 79       | 2   | "is 99, of which 79 are free, expected 80 for 2 ranks on a node"
"processes" | 80       | 2   | null
"processes" | 48       | 1   | null
"""),
)
def test_limits_that_block_open_mpi_are_refused(monkeypatch, name, limit, num_ranks, expected):
    limits = {'files': -1, 'bytes': -1, 'processes': 10**6, name: limit}
    names = {resource.RLIMIT_NOFILE: 'files', resource.RLIMIT_FSIZE: 'bytes'}
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (limits[names[kind]],) * 2)
    free = limits['processes'], 'ulimit -u is 99'
    monkeypatch.setattr(placement, 'free_processes', lambda: free)
    with refusal(expected):
        check_room(ENGINES['local'], num_ranks)
