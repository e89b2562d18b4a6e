"""Whether a configuration fits the GPUs: the batches that were tried on them, and the errors of MXNet in one line."""
from collections.abc import Sequence

from mlperf_rn50.system.checks import Check, Facts, hosts_of

_TELLING = ('Check failed', 'Error:', 'cuDNN', 'CUDA', 'out of memory')
# What the last line of an error of MXNet may hold, and what to do.
_FIXES = (
    ('out of memory', 'lower train.local_batch_size (with train.gradient_accumulation_steps for the same global '
     'batch) or train.eval_batch_size'),
    ('no kernel image', "this MXNet has no code for this card: use NVIDIA's container (docs/setup.md)"),
    ('CUDNN_STATUS_NOT_SUPPORTED', 'cuDNN has no kernel for these sizes: lower train.local_batch_size or '
     'train.eval_batch_size, or set model.layout to NCHW'),
    ('CUDNN_STATUS_BAD_PARAM', 'cuDNN refuses these sizes: lower train.local_batch_size or train.eval_batch_size, or '
     'set model.layout to NCHW'),
    ('insufficient for CUDA runtime', 'install a newer NVIDIA driver there'))


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
                 f'{max(r["trial"]["seconds"] for r in tried):.0f} s at most; '
                 f'up to {used / 1e9:.1f} GB of a GPU in use after')
