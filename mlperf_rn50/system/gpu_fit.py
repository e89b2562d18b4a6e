"""Whether a configuration fits the GPUs: an estimate of their memory, and a batch that was tried."""
from collections.abc import Sequence
from typing import Any

from mlperf_rn50.system.checks import Check, Facts, hosts_of

# An estimate that is over the card by more than so much is no matter of its precision.
FAR_OVER = 1.25
_NAMES = ('activations', 'evaluation', 'optimizer', 'workspace', 'pipeline')
_TELLING = ('Check failed', 'Error:', 'cuDNN', 'CUDA', 'out of memory')
# What the last line of an error of MXNet may hold, and what to do.
_FIXES = (
    ('out of memory', 'lower train.local_batch_size or train.eval_batch_size; the line on memory names the batch that '
     'fits'),
    ('no kernel image', "this MXNet has no code for this card: use NVIDIA's container (docs/setup.md)"),
    ('CUDNN_STATUS_NOT_SUPPORTED', 'cuDNN has no kernel for these sizes: lower train.local_batch_size or '
     'train.eval_batch_size, or set model.layout to NCHW'),
    ('CUDNN_STATUS_BAD_PARAM', 'cuDNN refuses these sizes: lower train.local_batch_size or train.eval_batch_size, or '
     'set model.layout to NCHW'),
    ('insufficient for CUDA runtime', 'install a newer NVIDIA driver there'))


def _gb(num_bytes: int) -> str:
    return f'{num_bytes / 1e9:.1f} GB'


def check_memory(rows: Sequence[Facts]) -> Check:
    """Whether the estimate of what a rank needs fits its GPU, or its share of one."""
    name = 'GPU memory'
    told = [r for r in rows if r['gpu_memory']]
    if not told:
        return Check(name, 'not needed', 'no driver tells how much the GPUs have')
    row = max(told, key=lambda r: sum(r['gpu_memory']['parts'].values()) / r['gpu_memory']['share_bytes'])
    facts: dict[str, Any] = row['gpu_memory']
    need, share = sum(facts['parts'].values()), facts['share_bytes']
    sharing = f', which is its part among {facts["num_sharing"]}' if facts['num_sharing'] > 1 else ''
    parts = ', '.join(f'{n} {_gb(facts["parts"][n])}' for n in _NAMES)
    found = (f'{_gb(need)} estimated for {facts["batch"]} images a rank, of {_gb(share)} on {row["host"]}{sharing} '
             f'({parts})')
    if need <= share:
        return Check(name, 'ok', f'{found}; up to {facts["largest_batch"]} would fit')
    fix = (f'lower train.local_batch_size to {facts["largest_batch"]}, or raise '
           'train.gradient_accumulation_steps' if facts['largest_batch'] else 'the network does not fit: use a larger '
           'card')
    return Check(name, 'failed' if need > FAR_OVER * share else 'warning', found, fix)


def one_line(error: str) -> str:
    """What an error of MXNet says, without its stack trace: the last line that names a failure, or the first one."""
    lines = [' '.join(line.split()) for line in error.splitlines()]
    lines = [line for line in lines if line and not line.startswith(('Traceback', 'Stack trace', '[bt]', 'File "'))]
    telling = [line for line in lines if any(word in line for word in _TELLING)]
    return (telling[-1:] or lines[:1] or ['an error without a word'])[0][:300]


def check_trial(rows: Sequence[Facts]) -> Check:
    """Whether a training pass and an evaluation of the configured batches ran on every GPU."""
    name = 'trial batches'
    tried = [r for r in rows if r['trial']]
    for row in tried:
        problem = row['trial']['problem']
        if problem:
            fix = next((fix for text, fix in _FIXES if text in problem), 'try model.layout NCHW, float32 and a smaller '
                       'batch to see which of them it is')
            return Check(name, 'failed', f'{row["trial"]["what"]} on {row["host"]}: {problem}', fix)
    if len(tried) < len(rows):
        return Check(name, 'not needed', f'no GPU to try on {hosts_of([r for r in rows if not r["trial"]])}')
    used = max(r['trial']['used_bytes'] for r in tried)
    return Check(name, 'ok', f'a training pass and an evaluation ran on every rank in '
                 f'{max(r["trial"]["seconds"] for r in tried):.0f} s at most; up to {_gb(used)} of a GPU in use after')
