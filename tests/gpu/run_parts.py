"""All parts of the GPU tests, the most valuable first, and one archive of their results; run.sh
starts it.

Each part is a process with its own limit. A part is left out, with the reason, if something that it
needs is missing. results.jsonl gets its result when it ends, and from conftest.py each test.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'docs'))
from make_speeds import expected_speed  # noqa: E402

from mlperf_rn50.system.gpus import find_visible_gpus  # noqa: E402
from mlperf_rn50.text import grouped  # noqa: E402

IS_DRY = os.environ.get('MLPERF_RN50_TEST_GPU') == 'dry'
BATCHES = [4, 2, 3, 1] if IS_DRY else [408, 51, 204, 15]
TORCH_BATCHES = [2] if IS_DRY else [208, 64, 408]
STEPS = ['--warmup-steps', 0, '--steps', 2] if IS_DRY else ['--warmup-steps', 20, '--steps', 60]
NETWORK = '--model.name=resnet18 --data.image_size=32 --data.resize_shorter=32'
SMALL = f'{NETWORK} --train.device=cpu --train.precision=float32'.split() if IS_DRY else []
CLOCKS = (
    'timestamp,index,pstate,clocks.sm,clocks.mem,power.draw,temperature.gpu,'
    'clocks_throttle_reasons.active'
)
# Only these variables are archived, because others may hold secrets.
VARIABLES = (
    '(CUDA|CUDNN|DALI|HOROVOD|KMP|MLPERF_RN50|MXNET|NCCL|NVIDIA|OMP|OMPI|UCX)_|LD_LIBRARY_PATH|PATH'
)
TORCH_PYTHONS = str(ROOT / 'benchmarks/.venv/bin/python'), '/usr/bin/python3'
# what a part may need
KERNELS, NVJPEG, HOROVOD = 'kernels', 'nvJPEG', 'Horovod'
SHARING, DIGITS, TORCH = 'MPS', 'digits', 'PyTorch'
RANKS = KERNELS, HOROVOD, SHARING
OUT_OF_MEMORY = 'out of memory|cudamalloc'
RATIO = 'images/s: ratio (.*)'  # of benchmarks/compare.py
MAX_FAILURES, MAX_WIDTH = 4, 200  # lines and characters


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[object]
    limit_s: float = 120
    env: dict[str, str] = field(default_factory=dict)
    needs: Sequence[str] = (KERNELS,)
    compared: str = ''  # the part with the reference speed


def cli(name: str, *words: object, num_ranks: int = 0, **keys: Any) -> Part:
    """Return a part that runs a command, under a launcher if num_ranks is above 0."""
    start = [ROOT / 'launch/ranks.sh', num_ranks] if num_ranks else []
    config = ['--config', ROOT / 'tests/gpu/resnet50.yaml', '--format', 'json', *SMALL]
    return Part(name, [*start, sys.executable, '-m', 'mlperf_rn50', *words, *config], **keys)


def bench(name: str, batch: int, *words: object, kind: str = 'train', **keys: Any) -> Part:
    return cli(f'{name}, {batch}', 'bench', kind, '--batch-sizes', batch, *STEPS, *words, **keys)


def compared(name: str, batch: int, *words: object, **env: str) -> Part:
    return bench(name, batch, *words, env=env, compared=f'synthetic, {batch}')


def tests(name: str, file: str, chosen: str = '', **keys: Any) -> Part:
    words = f'-m pytest -q {ROOT}/tests/gpu/test_{file}.py -k'.split(' ')
    return Part(name, [sys.executable, *words, chosen], **{'limit_s': 600, **keys})


def torch_step(batch: int, python: str) -> Part:
    """Return a part that compares training steps with PyTorch; its last line has the ratio."""
    device = 'cpu' if IS_DRY else 'gpu'
    words = f'step --rounds 1 --device {device} --batch-sizes {batch} --sides mlperf-rn50'.split()
    sides = 'torch eager', 'torch compiled', '--torch-python', python
    command = [sys.executable, ROOT / 'benchmarks/compare.py', *words, *sides]
    return Part(f'PyTorch, {batch}', command, 240, needs=(KERNELS, TORCH))


def make_parts(is_nvidias: bool, num_gpus: int, work: Path, torch_python: str = '') -> list[Part]:
    """Return all parts in order. work: folder of files that are not archived."""
    large, small, medium, least = BATCHES
    pictures = work / 'pictures'
    pack = [sys.executable, ROOT / 'tests/gpu/pictures.py', pictures, 16 if IS_DRY else 1024]
    images = '--data.synthetic=false', f'--data.dir={pictures}'
    warm = [*images, '--caches', 'warm', '--threads', '4,8']
    mixed = '--data.decoder=mixed'
    step = f'resnet50 and float16 and {"NHWC" if is_nvidias else "NCHW"}'
    if IS_DRY:
        step = 'resnet18 and float32 and NCHW'
    graphs = str(int(not is_nvidias))
    profiler = {'MXNET_PROFILER_AUTOSTART': '1', 'MXNET_PROFILER_MODE': '1'}
    separate = '--model.fused_bn_relu=false', '--model.fused_bn_add_relu=false'
    synchronous = {'MXNET_ASYNC_GPU_ENGINE': '0', 'HOROVOD_ENABLE_ASYNC_COMPLETION': '0'}
    of_nvidias = [
        compared('synchronous engine', small, **synchronous),
        compared('separate layers', medium, *separate),
    ]
    several = {'num_ranks': num_gpus, 'needs': (KERNELS, HOROVOD), 'limit_s': 300}
    exchange = tests('exchange', 'exchange', 'all_ranks[1]', needs=(KERNELS, HOROVOD))
    between_gpus = [
        exchange,
        bench('all GPUs', large, '--ranks', f'1,{num_gpus}', **several),
        bench('all-reduce', medium, kind='allreduce', **several),
    ]
    # the runs on all GPUs
    trained = (KERNELS, HOROVOD) if num_gpus > 1 else (KERNELS,)
    hardware = [
        bench(
            f'hw_decoder_load {load}',
            medium,
            *warm,
            mixed,
            f'--data.hw_decoder_load={load}',
            kind='data',
            needs=(KERNELS, NVJPEG),
        )
        for load in (0, 0.65, 1)
    ]
    of_ranks = [
        tests('kill of a rank', 'ranks', 'killed', needs=(*RANKS, DIGITS), limit_s=300),
        tests('run', 'ranks', 'one_rank_writes or command', needs=(KERNELS, DIGITS), limit_s=240),
        tests('resume', 'train', 'resumes', needs=(KERNELS, DIGITS), limit_s=120),
    ]
    return [
        cli('doctor', 'doctor', f'--run.dir={work}/doctor', needs=()),
        tests('binding and NVML', 'train', 'bound_near or nvml', needs=()),
        tests('step', 'step', f'(two_steps and {step}) or two_fused'),
        bench('synthetic', large),
        *(between_gpus if num_gpus > 1 else []),
        tests('exchange of one rank', 'exchange', 'one_rank', needs=(KERNELS, HOROVOD)),
        tests('ranks of a GPU', 'ranks', 'step_as_one', needs=RANKS, limit_s=180),
        torch_step(TORCH_BATCHES[0], torch_python),
        *of_ranks,
        Part('pictures', pack, needs=()),
        *hardware,
        bench('real', large, '--inputs', 'real', *images),
        tests('overflow', 'step', 'overflow'),
        tests('digests', 'step', 'digests'),
        *(torch_step(b, torch_python) for b in TORCH_BATCHES[1:]),
        *(bench('synthetic', b) for b in BATCHES[1:]),
        *(bench('real', b, '--inputs', 'real', *images) for b in BATCHES[1:]),
        # it also measures five steps in parts
        bench('profile', least, '--warmup-steps', 0, '--steps', 5, env=profiler),
        compared(f'graphs {graphs}', small, MXNET_ENABLE_CUDA_GRAPHS=graphs),
        *(of_nvidias if is_nvidias or IS_DRY else []),
        compared('no autotune', medium, MXNET_CUDNN_AUTOTUNE_DEFAULT='0'),
        compared('8 buckets', small, '--comm.num_buckets=8'),
        compared('static loss scale', small, '--train.loss_scale_policy=static'),
        compared('no change', small),
        tests('DALI', 'pipeline', 'images_match or trial'),
        tests('digits', 'train', 'digits', needs=(*trained, DIGITS)),
        tests('streams', 'pipeline', 'overwritten'),
        tests('layers', 'layers'),
        tests('steps', 'step', 'not resnet50' if IS_DRY else '', limit_s=1200),
        *([] if num_gpus > 1 else [exchange]),
        tests('exchange, two ranks per GPU', 'exchange', 'all_ranks[2]', needs=RANKS),
        bench('input cpu', medium, *warm, kind='data'),
        bench(
            'two ranks per GPU',
            small,
            '--run.ranks_per_device=2',
            env={'MLPERF_RN50_RANKS_PER_DEVICE': '2'},
            num_ranks=2 * num_gpus,
            needs=RANKS,
            limit_s=300,
        ),
        tests('CIFAR-10', 'train', 'cifar10', needs=trained, limit_s=3600),
    ]


def output_of(*command: str, limit_s: int = 20) -> str:
    """Return the output of a program, or why it has none; a faulty card can block nvidia-smi."""
    return subprocess.run(
        ['timeout', '--kill-after=5', str(limit_s), *command],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        stderr=subprocess.STDOUT,
        errors='replace',
    ).stdout


def has_torch(python: str) -> bool:
    # a build without code for the card, or for a newer driver, fails in the sum
    device = 'cpu' if IS_DRY else 'cuda'
    total = f'torch.ones(3, device="{device}").sum().item()'
    words = '-c', f'import numpy, torch; print("torch here", {total})'
    return 'torch here 3' in output_of(python, *words, limit_s=120)


def find_missing(has_torch: bool) -> dict[str, str]:
    """Return why parts that need something are left out, by need; a dry run lacks only nvJPEG."""
    build = output_of('horovodrun', '--check-build', limit_s=120)
    backend = 'MPI' if IS_DRY else 'NCCL'
    is_there = {
        HOROVOD: re.search(r'\[X\] MXNet', build) and re.search(rf'\[X\] {backend}', build),
        SHARING: IS_DRY or shutil.which('nvidia-cuda-mps-control'),
        NVJPEG: not IS_DRY,
        DIGITS: importlib.util.find_spec('sklearn'),
        TORCH: has_torch,
    }
    reasons = {
        HOROVOD: f'no Horovod with MXNet and {backend}',
        SHARING: 'no nvidia-cuda-mps-control',
        NVJPEG: 'a CPU has no nvJPEG',
        DIGITS: 'no scikit-learn, which has the digits',
        TORCH: 'no Python with NumPy, and PyTorch for this device; name one with --torch-python',
    }
    return {need: reasons[need] for need, found in is_there.items() if not found}


def write_facts(folder: Path) -> None:
    folder.mkdir()
    packages = sorted(f'{d.metadata["Name"]}=={d.version}' for d in metadata.distributions())
    facts = {
        'nvidia_smi_q': output_of('nvidia-smi', '-q'),
        'nvidia_smi_topo': output_of('nvidia-smi', 'topo', '-m'),
        'packages': '\n'.join(
            [sys.version, output_of('git', 'describe', '--always', '--dirty'), *packages]
        ),
        'environment': '\n'.join(
            f'{n}={v}' for n, v in sorted(os.environ.items()) if re.match(VARIABLES, n)
        ),
        'kernel': '\n'.join(
            line for line in output_of('dmesg').splitlines() if re.search('NVRM|dmesg', line)
        ),
    }
    for name, text in facts.items():
        (folder / f'{name}.txt').write_text(text)


def stop(process: subprocess.Popen) -> None:
    """End a process and its children, after time for a launcher to stop its ranks."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)


def failed_checks(text: str) -> str:
    """Return what failed checks of the doctor have found; '' for other output."""
    with suppress(ValueError, LookupError, TypeError):
        checks = json.loads(text)['checks']
        return '; '.join(c['found'] for c in checks if c['status'] == 'failed')
    return ''


def run_part(part: Part, out: Path, left_s: float, stops: Sequence[int] = ()) -> dict[str, Any]:
    """Run a part for at most left_s seconds, or until `stops` has a signal; return its result.

    `rows` of the result is the first table of a bench.
    """
    name = re.sub(r'\W+', '_', part.name)
    start = time.monotonic()
    end = start + min(part.limit_s, left_s)
    reason = ''
    printed = out / f'{name}.{"json" if "json" in part.command else "txt"}'
    messages = out / f'{name}.stderr.txt'
    env = {
        **os.environ,
        'PYTHONPATH': f'{ROOT}:{ROOT}/tests',
        'MLPERF_RN50_GPU_RESULT': str(out),
        **part.env,
    }
    with open(printed, 'w') as stdout, open(messages, 'w') as stderr:
        process = subprocess.Popen(
            [str(w) for w in part.command],
            cwd=out,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        while process.poll() is None and not stops and time.monotonic() < end:
            time.sleep(0.1)
        if process.poll() is not None:
            status = 'failed' if process.returncode else 'passed'
        elif stops or left_s <= part.limit_s:
            status = 'interrupted' if stops else 'cut'
        else:
            status, reason = 'failed', f'limit of {part.limit_s} s'
        stop(process)
    text, errors = (p.read_text(errors='replace') for p in (printed, messages))
    if status == 'failed':
        if re.search(OUT_OF_MEMORY, errors + text, re.IGNORECASE):
            status = 'out of memory'
        last = ''.join((errors or text).strip().splitlines()[-1:])
        reason = reason or failed_checks(text) or last
    result = {
        'part': part.name,
        'status': status,
        'seconds': round(time.monotonic() - start, 1),
        'reason': reason,
    }
    with suppress(ValueError, LookupError):
        result['rows'] = json.loads(text)['tables'][0]['rows']
    if ratio := re.search(RATIO, text):
        result['ratio'] = ratio[1]
    return result


def expected_line(gpu: str) -> str:
    """Return the speed that bench train should print on a GPU, from published systems."""
    if not (found := expected_speed(gpu)):
        return f'no speed of {gpu} has been published'
    return '{}: bench train should print {:,.0f} to {:,.0f} images/s per GPU'.format(*found)


def summarize(
    title: str, card: str, parts: Sequence[Part], results: Sequence[dict[str, Any]]
) -> list[str]:
    """Return at most 19 lines; a part that was left out has its reason."""
    first_rows = {r['part']: r['rows'][0] for r in results if r.get('rows')}
    speeds = {n: row['images_per_s'] for n, row in first_rows.items() if 'images_per_s' in row}
    failed = [
        f'failed: {r["part"]}: {r["reason"]}'[:MAX_WIDTH]
        for r in results
        if r['status'] == 'failed'
    ]
    incomplete = grouped(
        [r for r in results if r['status'] not in ('passed', 'failed')],
        lambda r: r['reason'] if r['status'] == 'left out' else r['status'],
    )
    others = [f'{why}: {", ".join(r["part"] for r in of)}' for why, of in incomplete.items()]
    ratios = [f'{r["ratio"]} with {r["part"].split(", ")[1]}' for r in results if 'ratio' in r]
    loads = [
        f'{speed:,.0f} with {name.split(", ")[0]}'
        for name, speed in speeds.items()
        if name.startswith('hw_decoder_load')
    ]
    measured = []
    for kind in ('synthetic', 'real'):
        of_kind = [n for n in speeds if n.startswith(f'{kind},')]
        values = ', '.join(f'{speeds[n]:,.0f} with {n.split(", ")[1]}' for n in of_kind)
        measured.append(f'images/s, {kind} images: {values}')
    return [
        title,
        ', '.join(f'{n} {status}' for status, n in Counter(r['status'] for r in results).items()),
        *failed[:MAX_FAILURES],
        *measured,
        f'ratio of images/s to the faster PyTorch: {", ".join(ratios) or "not measured"}',
        *([f'images/s of decoding: {"; ".join(loads)}'] if loads else []),
        *(
            f'{p.name} images: {speeds[p.name] / speeds[p.compared] - 1:+.1%}'
            for p in parts
            if {p.name, p.compared} <= {*speeds}
        ),
        expected_line(card)[:MAX_WIDTH],
        f'not complete: {"; ".join(others) or "none"}'[:MAX_WIDTH],
    ]


def run_all(
    parts: Sequence[Part], card: str, missing: dict[str, str], minutes: float, base: Path
) -> int:
    """Run parts up to the limit, write the archive, return the exit code. missing: reasons by
    need."""
    start = time.monotonic()
    clocks = None
    results: list[dict[str, Any]] = []
    stops: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: stops.append(received))
    out = base.resolve() / time.strftime(
        f'gpu_{re.sub("[^A-Za-z0-9]+", "_", card)}_%Y%m%dT%H%M%SZ', time.gmtime()
    )
    out.mkdir(parents=True)
    write_facts(out / 'start')
    with suppress(OSError), open(out / 'clocks.csv', 'w') as file:
        clocks = subprocess.Popen(
            ['nvidia-smi', f'--query-gpu={CLOCKS}', '--format=csv', '-l', '1'],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    for part in parts:
        left_s = 60 * minutes - (time.monotonic() - start)
        why = 'interrupted' if stops else 'no time left' if left_s < 1 else ''
        reasons = [missing[need] for need in part.needs if need in missing]
        if why or reasons:
            status, reason = ('not run', why) if why else ('left out', reasons[0])
            result = {'part': part.name, 'status': status, 'seconds': 0, 'reason': reason}
        else:
            limited = replace(part, limit_s=float('inf')) if IS_DRY else part
            result = run_part(limited, out, left_s, stops)
        results.append(result)
        with open(out / 'results.jsonl', 'a') as file:
            file.write(json.dumps(result) + '\n')
        with suppress(OSError):  # the terminal is closed
            print(f'{result["seconds"]:7.1f} s  {part.name}: {result["status"]}', flush=True)
    output_of('launch/mps.sh', 'stop')  # which the parts with several ranks per GPU started
    if clocks:
        stop(clocks)
    write_facts(out / 'end')
    notes = ['dry run on a CPU, so no value is of a GPU'] * IS_DRY
    minutes_taken = (time.monotonic() - start) / 60
    title = '; '.join(
        [f'{card}: {minutes_taken:.1f} minutes', *notes, *filter(None, [missing.get(KERNELS)])]
    )
    lines, archive = summarize(title, card, parts, results), out.with_name(f'{out.name}.tar.gz')
    (out / 'summary.txt').write_text('\n'.join([*lines, '']))
    with tarfile.open(f'{archive}.part', 'w:gz') as tar:
        tar.add(out, out.name)
    os.replace(f'{archive}.part', archive)
    shutil.rmtree(out)
    print('\n'.join([*lines, f'to send back: {archive}']))
    return 130 if stops else int(any(r['status'] == 'failed' for r in results))


def main() -> int:
    parser = argparse.ArgumentParser(
        'launch/test.sh --gpu', description='Test this program on the GPUs of a machine.'
    )
    parser.add_argument(
        '--minutes',
        type=float,
        default=12,
        help='limit of all parts, after the set-up (default: 12)',
    )
    parser.add_argument(
        '--torch-python',
        metavar='PYTHON',
        nargs=1,
        default=TORCH_PYTHONS,
        help='Python with PyTorch and NumPy (default: that of benchmarks/setup.sh or the system)',
    )
    options = parser.parse_args()
    variant = os.environ.get('MLPERF_RN50_VARIANT', '')
    gpus = find_visible_gpus()
    num_gpus = 2 if IS_DRY else max(1, len(gpus))
    card = gpus[0].name if gpus else 'CPU'
    torch_python = next(filter(has_torch, options.torch_python), '')
    missing = find_missing(bool(torch_python))
    if gpus and variant.startswith('cu') and int(gpus[0].compute_cap.split('.')[0]) >= 9:
        reason = f"the MXNet of {variant} has no code for it, only that of NVIDIA's container"
        missing = {KERNELS: reason, **missing}
    base = Path(os.environ.get('MLPERF_RN50_GPU_RESULT') or ROOT / 'logs')
    with tempfile.TemporaryDirectory() as work:
        parts = make_parts(variant == 'ngc', num_gpus, Path(work), torch_python)
        return run_all(parts, card, missing, options.minutes, base)


if __name__ == '__main__':
    sys.exit(main())
