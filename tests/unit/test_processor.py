"""Instruction sets of processors, and numbers of OpenMP threads."""

import pytest
from helpers import AVX2, AVX512, BF16, cpuinfo, json_table

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import environment
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.processor import (
    check_precision,
    find_processor,
    omp_threads,
    parse_processor,
    quota_threads,
    unbound_threads,
)


def processor(flags, **environment_variables):
    return parse_processor(cpuinfo(flags), environment_variables)


@pytest.mark.parametrize(
    'flags, has',
    [
        ('fpu sse2', 'no SSE4.1'),
        (AVX2, 'AVX2'),
        # The parts of AVX-512 in Knights Landing do not suffice for bfloat16 in oneDNN.
        (f'{AVX2} avx512f avx512cd avx512er avx512pf', 'AVX2'),
        (AVX512, 'AVX-512'),
        (BF16, 'AVX-512 BF16'),
        (f'{BF16} amx_tile amx_int8 amx_bf16', 'AMX'),
    ],
)
def test_instruction_sets(flags, has):
    cpu = processor(flags)
    assert (cpu.vendor, cpu.family, cpu.model) == ('AuthenticAMD', 25, 1)
    assert cpu.has == cpu.uses == has
    assert cpu.has_avx512 == has.startswith(('AVX-512', 'AMX'))


@pytest.mark.parametrize(
    'limit, uses',
    json_table("""
"AVX512_MIC"      | "AVX2"
"AVX512_CORE"     | "AVX-512"
"AVX512_CORE_AMX" | "AVX-512 BF16"
"ALL"             | "AVX-512 BF16"
"avx2"            | "AVX-512 BF16"
"""),
)  # oneDNN ignores lower case
def test_limit_of_onednn(limit, uses):
    cpu = processor(BF16, DNNL_MAX_CPU_ISA=limit)
    assert (cpu.has, cpu.uses) == ('AVX-512 BF16', uses)
    # a limit does not add instruction sets
    assert processor(AVX2, DNNL_MAX_CPU_ISA=limit).uses == 'AVX2'


def test_processor_and_limit_of_this_process(fake_processor):
    fake_processor(BF16, limit='AVX2')
    assert find_processor() == processor(BF16, DNNL_MAX_CPU_ISA='AVX2')
    assert 'EPYC, AVX-512 BF16, limited to AVX2 by DNNL_MAX_CPU_ISA' in environment.render_stack()
    fake_processor(AVX2)
    assert environment.render_stack().endswith('\nEPYC, AVX2')


def test_other_architectures_have_no_instruction_set():
    cpu = parse_processor('processor: 0\nFeatures: fp asimd\n', {})
    assert (cpu.vendor, cpu.family, cpu.has) == ('', None, 'no SSE4.1') and not cpu.has_avx512


def test_bfloat16_without_avx512_is_refused_with_advice():
    for precision, flags in [('float32', AVX2), ('float16', AVX2), ('bfloat16', AVX512)]:
        check_precision('train.precision', precision, processor(flags))
    with pytest.raises(ConfigError, match='^train.precision: .* with AVX2, .* AVX-512; use flo'):
        check_precision('train.precision', 'bfloat16', processor(AVX2))
    with pytest.raises(ConfigError, match='^--precisions: .*ISA=AVX2 limits a .*; unset the var'):
        check_precision('--precisions', 'bfloat16', processor(BF16, DNNL_MAX_CPU_ISA='AVX2'))


def test_first_level_of_nested_threads_counts():
    assert (omp_threads('4'), omp_threads(' 3 , 2,1')) == (4, 3)
    for text in ('', '0', ',2', '100000', '²', '9' * 5000):
        assert omp_threads(text) is None


@pytest.mark.parametrize(
    'quota, local_size, threads',
    json_table("""
null | 2 | 8
0.5  | 1 | 1
5.9  | 2 | 2
64.0 | 2 | 8
"""),
)
def test_threads_follow_share_of_cpu_quota(quota, local_size, threads):
    assert quota_threads(8, local_size, GroupLimits(quota_cpus=quota)) == threads


@pytest.mark.parametrize(
    'num_cpus, local_size, limits, threads',
    json_table("""
64 | 4 | {}                        | 16
64 | 4 | {"quota_cpus": 6.0}       | 1
16 | 4 | {}                        | 16  # bound by a different program
4  | 2 | {"cpuset": [0, 1, 2, 3]}  | 2
2  | 4 | {"cpuset": [0, 1]}        | 1
"""),
)
def test_threads_of_unbound_rank(num_cpus, local_size, limits, threads):
    assert unbound_threads(range(num_cpus), 64, local_size, GroupLimits(**limits)) == threads
