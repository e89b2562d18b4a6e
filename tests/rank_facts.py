"""Made-up facts of ranks for the doctor, and an assertion on its checks."""

import re

from mlperf_rn50.doctor.gpu_stack import environment_facts
from mlperf_rn50.doctor.result import Check, DataFacts, HorovodFacts, MxnetFacts, RankFacts
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.processor import Processor

PACKAGES = {'mxnet': '1.9.1', 'horovod': '0.28.1', 'numpy': '1.23.5'}
ULIMITS = {'open_files': 1024, 'address_space_bytes': None, 'locked_bytes': 8 << 20}
DATA = DataFacts('', 'digits', 128, True, 'mmmm', 1797)
HOROVOD = HorovodFacts(['MPI', 'Gloo'], 'Gloo controller', True, ['MPI', 'Gloo'])


def epyc(uses: str = 'AVX-512 BF16', has: str = '') -> Processor:
    return Processor('EPYC', 'AuthenticAMD', 25, 17, has or uses, uses, '')


def rank_facts(rank: int = 0, host: str = 'h1', **changes) -> RankFacts:
    """Return the facts of a rank without problems, two per host, on 4 of the 16 CPUs each."""
    use = dict(cores=f'{rank % 2}', num_cores=1, wall_s=1.0, cpu_s=0.1, cores_s=0.2, load=0.5)
    facts = dict(
        rank=rank,
        host=host,
        local_rank=rank % 2,
        local_size=2,
        python='3.11.7',
        code='aaaa',
        processor=epyc(),
        layers='fused',
        config='cccc',
        packages=PACKAGES,
        dali='2.4.0',
        mxnet=MxnetFacts('cpu', '', {}, ''),
        cuda_libraries={},
        gpus=[],
        visible=None,
        num_open_gpus=8,
        device=None,
        device_problem='',
        trial=None,
        gpu_environment=environment_facts({}, False),
        horovod=HOROVOD,
        data=DATA,
        energy={'cpu': 2, 'gpu': 8},
        disk_free_bytes=10**12,
        memory_available_bytes=10**11,
        omp_num_threads='4',
        run_folder_problem='',
        cpus=[4 * (rank % 2) + i for i in range(4)],
        num_machine_cpus=16,
        cgroup=GroupLimits(),
        shared_memory_free_bytes=10**10,
        tmp_dir='/tmp',
        tmp_dir_problem='',
        ulimits=ULIMITS,
        free_processes=None,
        use={**use, 'machine': host},
        clock_offset_s=0.001,
        all_reduce_s=0.01,
        all_reduce_bytes=10**8,
        start_s=None,
        checkpoint=None,
    )
    return RankFacts(**{**facts, **changes})  # type: ignore[arg-type]


def assert_reads(check: Check, expected: str) -> None:
    """Assert that a check begins with 'status: found; fix'; '...' is for any text."""
    text = '; '.join(filter(None, (f'{check.status}: {check.found}', check.fix)))
    pattern = '.*'.join(map(re.escape, re.split(r' ?\.\.\. ?', expected)))
    assert re.match(pattern, text), text
