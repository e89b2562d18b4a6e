"""What a processor can run, from its flags and from what oneDNN is allowed."""
import pytest

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.processor import check_precision, find_processor, parse_processor

AVX2 = 'fpu sse4_1 sse4_2 avx f16c fma avx2 bmi2'
AVX512 = f'{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl'
BF16 = f'{AVX512} avx512_vnni avx512_bf16'


def cpuinfo(flags, **fields):
    lines = {'processor': '0', 'vendor_id': 'AuthenticAMD', 'cpu family': '25', 'model': '1', 'model name': 'EPYC',
             'flags': flags, **fields}
    one = ''.join(f'{k}\t: {v}\n' for k, v in lines.items())
    return f'{one}\n{one.replace("EPYC", "other")}'


def processor(flags, limit=None):
    return parse_processor(cpuinfo(flags), {} if limit is None else {'DNNL_MAX_CPU_ISA': limit})


@pytest.mark.parametrize('flags, has', [
    ('fpu sse2', 'no SSE4.1'), (AVX2, 'AVX2'),
    # Knights Landing has another half of AVX-512, which oneDNN's bfloat16 does not take.
    (f'{AVX2} avx512f avx512cd avx512er avx512pf', 'AVX2'),
    (AVX512, 'AVX-512'), (BF16, 'AVX-512 BF16'), (f'{BF16} amx_tile amx_int8 amx_bf16', 'AMX')])
def test_instruction_sets(flags, has):
    found = processor(flags)
    assert (found.vendor, found.family, found.model, found.has, found.uses) == ('AuthenticAMD', 25, 1, has, has)
    assert found.can_train_bfloat16 == has.startswith(('AVX-512', 'AMX'))


@pytest.mark.parametrize('limit, uses', [
    ('AVX512_MIC', 'AVX2'), ('AVX512_CORE', 'AVX-512'), ('AVX512_CORE_AMX', 'AVX-512 BF16'), ('ALL', 'AVX-512 BF16'),
    ('avx2', 'AVX-512 BF16')])  # which oneDNN does not read in small letters
def test_the_limit_of_onednn(limit, uses):
    found = processor(BF16, limit)
    assert (found.has, found.uses) == ('AVX-512 BF16', uses)
    assert processor(AVX2, limit).uses == 'AVX2'  # it adds nothing


def test_other_machines_have_none_of_it():
    found = parse_processor('processor: 0\nFeatures: fp asimd\n', {})
    assert (found.vendor, found.family, found.has) == ('', None, 'no SSE4.1') and not found.can_train_bfloat16


def test_bfloat16_is_refused_without_avx512_and_the_line_says_what_to_do():
    for precision, flags in [('float32', AVX2), ('float16', AVX2), ('bfloat16', AVX512)]:
        check_precision('train.precision', precision, processor(flags))
    with pytest.raises(ConfigError, match='^train.precision: got bfloat16, this processor has no AVX-512, only AVX2; '
                                          'use float32$'):
        check_precision('train.precision', 'bfloat16', processor(AVX2))
    with pytest.raises(ConfigError, match='^--precisions: got bfloat16, and DNNL_MAX_CPU_ISA=AVX2 leaves AVX2 of '
                                          'AVX-512 BF16, expected AVX-512; unset it, or use float32$'):
        check_precision('--precisions', 'bfloat16', processor(BF16, 'AVX2'))


def test_this_processor_is_known():
    assert find_processor().has != 'no SSE4.1'
