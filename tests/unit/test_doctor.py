"""Doctor: checks of made-up facts, the limits of this process, and the answer."""

import errno
import json
import os
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest
from helpers import table
from msgspec.structs import replace as with_changes
from rank_facts import DATA, HOROVOD, PACKAGES, ULIMITS, assert_reads, epyc, rank_facts

from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.cli.doctor import checks_answer
from mlperf_rn50.doctor.checks import check_facts, has_failed
from mlperf_rn50.doctor.machine import limit_facts
from mlperf_rn50.doctor.result import DataFacts, MxnetFacts, parse_facts
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.system import mpi_session
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.gpus import Gpu
from mlperf_rn50.system.mpi_session import check_session


def rows(h1_changes=None, **h2_changes):
    """Return facts of two ranks on each of two hosts, with changes per host."""
    return [
        *(rank_facts(r, 'h1', **h1_changes or {}) for r in (0, 1)),
        *(rank_facts(r, 'h2', **h2_changes) for r in (2, 3)),
    ]


def check(name, gathered, **requested):
    return next(c for c in check_facts(gathered, **requested) if c.name == name)


def test_suitable_hosts_pass():
    checks = check_facts(rows(), 'cpu', 'bfloat16', 2, 2, 10**9)
    assert not has_failed(checks)
    totals = 'doctor: 25 checks passed, 0 failed, 0 warnings'
    assert render_text(checks_answer(checks, is_quiet=True)) == totals
    text = render_text(checks_answer(checks, is_quiet=False))
    assert text.startswith(f'{totals}\n\nok          program          code aaaa on all ranks\n')
    assert '100 MB in 10 ms: 10.00 GB/s, bus 15.00 GB/s' in text and 'fix:' not in text


def test_facts_are_validated_where_they_arrive():
    facts = rank_facts(free_processes=(31, 'ulimit'))
    sent = msgspec.json.decode(msgspec.json.encode(facts))
    assert parse_facts(sent) == facts
    assert list(msgspec.to_builtins(DataFacts('no manifest'))) == ['problem']
    for wrong in ({**sent, 'rank': '0'}, {k: v for k, v in sent.items() if k != 'code'}):
        with pytest.raises(UserError, match='(rank|code).*; check out the same commit'):
            parse_facts(wrong)


def test_energy_of_gpus_that_the_metering_rank_cannot_open_is_not_promised():
    facts = {'device': 0, 'num_open_gpus': 1, 'energy': {'cpu': 0, 'gpu': 1}}
    cards = [Gpu(f'GPU-{k}', 'A100', '', '8.0', '535.129.03', None) for k in 'ab']
    ranks = [rank_facts(rank, 'h1', gpus=[card], **facts) for rank, card in enumerate(cards)]
    assert check('energy', ranks).status == 'not needed'
    assert check('energy', ranks[:1]).status == 'ok'


def test_clock_that_differs_from_most_is_named_also_that_of_rank_0():
    def clocks(*offsets):
        hosts = [
            rank_facts(2 * k, f'h{k + 1}', clock_offset_s=offset)
            for k, offset in enumerate(offsets)
        ]
        return check('clocks', hosts)

    assert_reads(clocks(0.0, 0.9, -0.9), 'failed: at most 1800 ms apart (h3 and h2)')
    assert_reads(clocks(0.0, 3.0, 3.0), 'failed: at most 3000 ms apart ... clock of h1,')


# A check, its result, and changes of h2; "requested" has values of the configuration.
CASES = table("""
clocks | ok: at most 999 ms apart (h1 and h2) | {"clock_offset_s": 1.0}
memory | ok: 2.1 GB available per rank on h2 | {"memory_available_bytes": 4294967296}
program | failed: code bbbb on h2, but code aaaa on h1 ... same commit on h2 | {"code": "bbbb"}
packages | failed: numpy 1.22.0 on h2, but numpy 1.23.5 ... | {"packages": {"numpy": "1.22.0"}}
packages | failed: numpy missing on h2 | {"packages": {"numpy": null}}
data set | failed: manifest xxxx with 9 images on h2, but manifest mmmm ... to h2 again \
    | {"data": {"manifest": "xxxx", "num_images": 9}}
data set | failed: on h2: train.rec: no ... prepare | {"data": {"problem": "train.rec: no such"}}
.idx and .rec | ok: 128 records checked on each rank, with their checksums | {}
clocks | failed: at most 3201 ms apart (h2 and h1) ... clock of h2 | {"clock_offset_s": -3.2}
ranks and nodes | failed: ...2 nodes (h1: 2, h2: 1) ... h2 has 1 \
    | {"local_size": 1, "requested": {"ranks_per_node": 2}}
ranks and nodes | failed: 4 ranks on 2 nodes ... num_nodes is 4 | {"requested": {"num_nodes": 4}}
disk | failed: 0.0 GB free for the run folder on h2, 1.0 GB needed ... free space \
    | {"disk_free_bytes": 10, "requested": {"needed_disk_bytes": 1000000000}}
TMPDIR | failed: /scratch on h2: No space left; ... 10 MB free ... set TMPDIR \
    | {"tmp_dir": "/scratch", "tmp_dir_problem": "No space left"}
Horovod | failed: ...operations MPI+Gloo ... NCCL: MLPERF_RN50_VARIANT=cu117 \
    | {"requested": {"device": "gpu"}}
processor | failed: EPYC, AVX2 on h2 ... use float32 \
    | {"processor": "AVX2", "requested": {"precision": "bfloat16"}}
layers | ok: fused on h1; plain on h2 | {"layers": "plain"}
processor | warning: EPYC, AVX2 on h2, but EPYC, AVX-512 BF16 on h1 ... | {"processor": "AVX2"}
threads | warning: 10 threads on the 8 CPUs available to the ranks of h2 ... fewer ranks \
    | {"omp_num_threads": "5"}
threads | warning: OMP_NUM_THREADS is not set on h2 ... launch/ | {"omp_num_threads": ""}
threads | warning: 8 threads on the 6.5 CPUs available to the ranks of h2 \
    | {"cgroup": {"quota_cpus": 6.5}}
threads | ok: 4 per rank | {"cgroup": {"quota_cpus": 1.5}, "omp_num_threads": "1"}
CPUs | ok: 2 ranks may use 8 of the 16 CPUs of h1 | {}
CPUs | warning: 2 ranks may use 1 of the 16 CPUs of h2 ... at most 1 there | {"cpus": [3]}
CPUs | warning: ...1.5 of the 16 CPUs of h2, the quota of their ... at most 1 there \
    | {"cgroup": {"quota_cpus": 1.5}}
memory | warning: 1.6 GB available per rank on h2 ... fewer | {"memory_available_bytes": 3221225472}
memory | ok: 3.5 GB available ... group allows 8.0 GB, 1.0 GB of it ... raise the limit \
    | {"cgroup": {"memory_limit_bytes": 8000000000, "memory_used_bytes": 1000000000}}
memory | warning: 0.0 GB available \
    | {"cgroup": {"memory_limit_bytes": 1000000000, "memory_used_bytes": 2000000000}}
shared memory | warning: 8 MB free in /dev/shm on h2, 8 MB needed ... --shm-size=1g \
    | {"shared_memory_free_bytes": 8388608}
disk | ok: 1000.0 GB free for the run folder on h1 \
    | {"disk_free_bytes": 10, "run_folder_problem": "no /x"}
shared memory | warning: no /dev/shm on h2 | {"shared_memory_free_bytes": null}
shared memory | warning: ...1,074 MB needed \
    | {"shared_memory_free_bytes": 67108864, "requested": {"device": "gpu"}}
processes | warning: 31 more can start on h2 (ulimit -u is 40) ... raise ulimit -u \
    | {"free_processes": [31, "ulimit -u is 40"]}
open files | ok: 138 for a rank on h2, up to 138 needed | {"ulimits": {"open_files": 138}}
open files | warning: 137 for a rank on h2, up to 138 needed ... ulimit -n 138 \
    | {"ulimits": {"open_files": 137}}
open files | ok: 1,024 for a rank on h1 | {"ulimits": {"open_files": null}}
address space | warning: 4,000.0 MB for a rank on h2 ... ulimit -v \
    | {"ulimits": {"address_space_bytes": 4000000000}}
locked memory | warning: 8.4 MB for a rank on h1, h2, expected unlimited ... ulimit -l \
    | {"requested": {"device": "gpu"}}
locked memory | not needed: | {}
energy | ok: 4 CPU packages can be measured; 16 GPUs can be measured | {}
energy | ok: 2 CPU packages can be measured, none on h2, so | {"energy": {"cpu": 0, "gpu": 8}}
run folder | ok: visible on all 2 hosts | {}
run folder | warning: files of h1 are not visible on h2 (no /x) | {"run_folder_problem": "no /x"}
""")
MAKERS = {
    'cgroup': lambda limits: GroupLimits(**limits),
    'data': lambda facts: with_changes(DATA, **facts),
    'packages': lambda new: {k: v for k, v in {**PACKAGES, **new}.items() if v},
    'processor': epyc,
    'ulimits': lambda new: {**ULIMITS, **new},
}


@pytest.mark.parametrize('name, expected, changes', CASES)
def test_differences_between_hosts_are_reported(name, expected, changes):
    changes = json.loads(changes)
    requested = changes.pop('requested', {})
    facts = {key: MAKERS.get(key, lambda v: v)(value) for key, value in changes.items()}
    assert_reads(check(name, rows(**facts), **requested), expected)


def test_problems_of_rank_0_and_of_single_ranks():
    unsealed = {'data': with_changes(DATA, has_checksums=False)}
    assert ', without checksums' in check('.idx and .rec', rows(unsealed)).found
    for problem, status in (('/run: Read-only file system', 'failed'), (None, 'not needed')):
        assert check('run folder', rows({'run_folder_problem': problem})).status == status
    container = {'mxnet': MxnetFacts('container', '24.06', {}, '')}
    assert 'VARIANT=ngc' in check('Horovod', rows(container), device='gpu').fix
    endless = {'ulimits': {**ULIMITS, 'open_files': None}}
    assert check('open files', rows(endless, **endless)).found.startswith('unlimited')
    with_mpi = {'horovod': replace(HOROVOD, has_gloo=False)}
    many = check('open files', [rank_facts(r, f'h{r // 8}', **with_mpi) for r in range(3584)])
    assert many.status == 'ok' and many.found.endswith('up to 128 needed')
    alone = dict(local_rank=0, local_size=1, shared_memory_free_bytes=0)
    single_ranks = [rank_facts(r, f'h{r}', **alone) for r in range(2)]
    assert check('shared memory', single_ranks).status == 'not needed'
    assert check('all-reduce', [rank_facts()]).found == 'one rank'
    layout = check('ranks and nodes', single_ranks * 5, num_nodes=10)
    assert layout.status == 'ok' and layout.found.endswith('h1: 1, …)')


def test_limits_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    limits = limit_facts()
    assert (limits['tmp_dir'], limits['tmp_dir_problem']) == (str(tmp_path), '')
    # a rank on another host, whose TMPDIR is not that of the launcher
    monkeypatch.setenv('OMPI_MCA_orte_tmpdir_base', '/scratch/mlperf_rn50-1')
    assert limit_facts()['tmp_dir'] == '/scratch'
    monkeypatch.delenv('OMPI_MCA_orte_tmpdir_base')
    assert limits['cpus'] == sorted(os.sched_getaffinity(0))
    assert min(limits['memory_available_bytes'], limits['ulimits']['open_files']) > 0
    assert not list(tmp_path.iterdir())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, 'posix_fallocate', Mock(side_effect=full))
    assert limit_facts()['tmp_dir_problem'] == 'No space left on device'
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'none'))
    assert limit_facts()['tmp_dir_problem'] == 'No such file or directory'


def test_ranks_refuse_a_full_session_folder_of_open_mpi(monkeypatch, tmp_path):
    base = tmp_path / 'mlperf_rn50-1-a'
    base.mkdir()
    free = {tmp_path: 9 << 20}
    monkeypatch.setattr(mpi_session, 'free_bytes', free.get)
    env = {'OMPI_MCA_orte_tmpdir_base': str(base)}
    with pytest.raises(ConfigError, match='has 9.4 MB free, expected 10 MB'):
        check_session(env)
    check_session({})  # horovodrun and srun do not use this folder
    (base / 'segment').write_bytes(bytes(2 << 20))
    check_session(env)  # the files already exist


def test_other_programs_on_the_cpus_of_a_rank_are_a_warning():
    assert check('other programs', rows()).status == 'ok'
    busy = rows()
    busy[3].use.update(cores_s=0.9, load=8.2)
    found = check('other programs', busy)
    assert found.status == 'warning'
    assert found.found == 'they use 80 % of the CPUs 1 of rank 3 on h2 (load average 8.2)'
    for row in busy:
        del row.use['cores_s']  # unknown in some containers
    assert check('other programs', busy).status == 'not needed'
