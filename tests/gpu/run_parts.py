"""All parts of the GPU tests, the most valuable first, and one archive of their results; run.sh
starts it.

Each part is a process with its own limit. results.jsonl gets its result when it ends, and from
conftest.py each test.
"""

import argparse
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
IS_DRY = os.environ.get('MLPERF_RN50_TEST_GPU') == 'dry'
BATCHES = [4, 2, 3, 1] if IS_DRY else [408, 51, 204, 15]
STEPS = ['--warmup-steps', 0, '--steps', 2] if IS_DRY else ['--warmup-steps', 20, '--steps', 60]
SMALL = (
    [
        '--model.name=resnet18',
        '--data.image_size=32',
        '--data.resize_shorter=32',
        '--train.device=cpu',
        '--train.precision=float32',
    ]
    if IS_DRY
    else []
)
CLOCKS = (
    'timestamp,index,pstate,clocks.sm,clocks.mem,power.draw,temperature.gpu,'
    'clocks_throttle_reasons.active'
)
# Only these variables are archived, because others may hold secrets.
VARIABLES = (
    '(CUDA|CUDNN|DALI|HOROVOD|KMP|MLPERF_RN50|MXNET|NCCL|NVIDIA|OMP|OMPI|UCX)_|LD_LIBRARY_PATH|PATH'
)
MAX_FAILURES, MAX_WIDTH = 4, 200  # lines and characters


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[object]
    limit_s: float = 120
    env: dict[str, str] = field(default_factory=dict)
    needs_kernels: bool = True  # of MXNet for this card
    compared: str = ''  # the part with the reference speed


def cli(name: str, *words: object, **keys: Any) -> Part:
    config = ['--config', ROOT / 'tests/gpu/resnet50.yaml', '--format', 'json', *SMALL]
    return Part(
        name, [sys.executable, '-m', 'mlperf_rn50', *words[:2], *config, *words[2:]], **keys
    )


def bench(name: str, batch: int, *words: object, **keys: Any) -> Part:
    return cli(f'{name}, {batch}', 'bench', 'train', '--batch-sizes', batch, *STEPS, *words, **keys)


def compared(name: str, batch: int, *words: object, **env: str) -> Part:
    return bench(name, batch, *words, env=env, compared=f'synthetic, {batch}')


def tests(name: str, file: str, chosen: str = '', **keys: Any) -> Part:
    command = [
        sys.executable,
        '-m',
        'pytest',
        '-q',
        ROOT / f'tests/gpu/test_{file}.py',
        '-k',
        chosen,
    ]
    return Part(name, command, **{'limit_s': 600, **keys})


def make_parts(is_nvidias: bool, work: Path) -> list[Part]:
    """Return all parts in order. work: folder of files that are not archived."""
    _, small, medium, least = BATCHES
    pictures, num = work / 'pictures', 16 if IS_DRY else 1024
    pack = (
        'import pathlib, gpu.pictures; '
        f'gpu.pictures.pack_pictures(pathlib.Path({str(pictures)!r}), {num})'
    )
    real = [
        '--inputs',
        'real',
        f'--data.dir={pictures}',
        '--data.dataset=pictures',
        f'--data.num_train={num}',
        '--data.num_val=10',
        '--data.num_classes=10',
    ]
    step = (
        'resnet18 and float32 and NCHW'
        if IS_DRY
        else f'resnet50 and float16 and {"NHWC" if is_nvidias else "NCHW"}'
    )
    graphs = str(int(not is_nvidias))
    return [
        cli('doctor', 'doctor', f'--run.dir={work}/doctor', needs_kernels=False),
        tests('binding and NVML', 'train', 'bound_near or nvml', needs_kernels=False),
        tests('step', 'step', f'(two_steps and {step}) or two_fused or large_batch_in_chosen'),
        tests('overflow', 'step', 'overflow'),
        tests('digests', 'step', 'digests'),
        tests('exchange of one rank', 'exchange', 'one_rank'),
        Part('pictures', [sys.executable, '-c', pack], needs_kernels=False),
        *(bench('synthetic', b) for b in BATCHES),
        *(bench('real', b, *real) for b in BATCHES),
        # it also measures five steps in parts
        bench(
            'profile',
            least,
            '--warmup-steps',
            0,
            '--steps',
            5,
            env={'MXNET_PROFILER_AUTOSTART': '1', 'MXNET_PROFILER_MODE': '1'},
        ),
        compared(f'graphs {graphs}', small, MXNET_ENABLE_CUDA_GRAPHS=graphs),
        *[
            compared(
                'synchronous engine',
                small,
                MXNET_ASYNC_GPU_ENGINE='0',
                HOROVOD_ENABLE_ASYNC_COMPLETION='0',
            ),
            compared(
                'separate layers',
                medium,
                '--model.fused_bn_relu=false',
                '--model.fused_bn_add_relu=false',
            ),
        ]
        * (is_nvidias or IS_DRY),  # other builds have neither
        compared('no autotune', medium, MXNET_CUDNN_AUTOTUNE_DEFAULT='0'),
        compared('8 buckets', small, '--comm.num_buckets=8'),
        compared('static loss scale', small, '--train.loss_scale_policy=static'),
        compared('no change', small),
        tests('DALI without MXNet', 'pipeline', 'without_mxnet', needs_kernels=False),
        tests('DALI', 'pipeline', 'images_match or trial'),
        tests('digits', 'train', 'digits'),
        tests('streams', 'pipeline', 'overwritten'),
        tests('layers', 'layers'),
        tests('steps', 'step', 'not resnet50' if IS_DRY else '', limit_s=1200),
        tests('exchange', 'exchange'),
        tests('benches', 'bench', limit_s=1800),
        tests('runs', 'train', 'not (digits or bound or nvml)', limit_s=3600),
    ]


def output_of(*command: str) -> str:
    """Return the output of a program, or why it has none; a faulty card can block nvidia-smi."""
    return subprocess.run(
        ['timeout', '--kill-after=5', '20', *command],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        stderr=subprocess.STDOUT,
        errors='replace',
    ).stdout


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


def run_part(part: Part, out: Path, left_s: float, stops: Sequence[int] = ()) -> dict[str, Any]:
    """Run a part for at most left_s seconds, or until `stops` has a signal; return its result.

    `rows` of the result is the first table of a bench.
    """
    name, start, reason = re.sub(r'\W+', '_', part.name), time.monotonic(), ''
    paths = (
        out / f'{name}.{"json" if "json" in part.command else "txt"}',
        out / f'{name}.stderr.txt',
    )
    env = {
        **os.environ,
        'PYTHONPATH': f'{ROOT}:{ROOT}/tests',
        'MLPERF_RN50_GPU_RESULT': str(out),
        **part.env,
    }
    with open(paths[0], 'w') as stdout, open(paths[1], 'w') as stderr:
        process = subprocess.Popen(
            [str(w) for w in part.command],
            cwd=out,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        while (
            process.poll() is None
            and not stops
            and time.monotonic() < start + min(part.limit_s, left_s)
        ):
            time.sleep(0.1)
        if process.poll() is not None:
            status = 'failed' if process.returncode else 'passed'
        elif stops or left_s <= part.limit_s:
            status = 'interrupted' if stops else 'cut'
        else:
            status, reason = 'failed', f'limit of {part.limit_s} s'
        stop(process)
    text, errors = (p.read_text(errors='replace') for p in paths)
    if status == 'failed':
        status = (
            'out of memory'
            if re.search('out of memory|cudamalloc', errors, re.IGNORECASE)
            else status
        )
        reason = reason or ''.join((errors or text).strip().splitlines()[-1:])
    result = {
        'part': part.name,
        'status': status,
        'seconds': round(time.monotonic() - start, 1),
        'reason': reason,
    }
    with suppress(ValueError, LookupError):
        result['rows'] = json.loads(text)['tables'][0]['rows']
    return result


def card_row(card: str) -> list[str]:
    """Return the row of docs/gpu.md with the expected speed of a card, after the heading of the
    table of speeds."""
    lines = (ROOT / 'docs/gpu.md').read_text().split('## Expected speed')[-1].splitlines()
    heading = next(line for line in lines if line.startswith('| card'))
    words = set(re.split(r'[\W_]|(?<=sxm)\d', card.lower()))
    kinds = [
        (len(found), line)
        for line in lines
        if line.startswith('| ')
        for kind in line.split('|')[1].lower().split(',')
        if (found := set(kind.split())) and found <= words
    ]
    if kinds:
        # the row that names the form and memory of the card, if there is one
        line = max(kinds, key=lambda k: k[0])[1]
        return [heading, line] if line.count('|') == heading.count('|') else [line[:MAX_WIDTH]]
    return ['docs/gpu.md has no row for this card']


def summarize(
    title: str, card: str, parts: Sequence[Part], results: Sequence[dict[str, Any]]
) -> list[str]:
    """Return at most 19 lines."""
    speeds = {r['part']: r['rows'][0]['images_per_s'] for r in results if r.get('rows')}
    failed = [
        f'failed: {r["part"]}: {r["reason"]}'[:MAX_WIDTH]
        for r in results
        if r['status'] == 'failed'
    ]
    others = [
        f'{r["part"]} ({r["status"]})' for r in results if r['status'] not in ('passed', 'failed')
    ]
    measured = {
        kind: [
            f'{s:,.0f} with {n.split(", ")[1]}'
            for n, s in speeds.items()
            if n.startswith(f'{kind},')
        ]
        for kind in ('synthetic', 'real')
    }
    return [
        title,
        ', '.join(f'{n} {status}' for status, n in Counter(r['status'] for r in results).items()),
        *failed[:MAX_FAILURES],
        *(f'images/s, {kind} images: {", ".join(s)}' for kind, s in measured.items()),
        *(
            f'{p.name} images: {speeds[p.name] / speeds[p.compared] - 1:+.1%}'
            for p in parts
            if {p.name, p.compared} <= {*speeds}
        ),
        *card_row(card),
        f'not complete: {", ".join(others) or "none"}'[:MAX_WIDTH],
    ]


def run_all(parts: Sequence[Part], card: str, reason: str, minutes: float, base: Path) -> int:
    """Run parts up to the limit, write the archive, return the exit code. reason: why MXNet lacks
    kernels, or ''."""
    start, results, clocks, stops = time.monotonic(), list[dict[str, Any]](), None, list[int]()
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
        why = (
            'interrupted'
            if stops
            else 'no time left'
            if left_s < 1
            else reason
            if part.needs_kernels
            else ''
        )
        results.append(
            {'part': part.name, 'status': 'not run', 'seconds': 0, 'reason': why}
            if why
            else run_part(
                replace(part, limit_s=float('inf')) if IS_DRY else part, out, left_s, stops
            )
        )
        with open(out / 'results.jsonl', 'a') as file:
            file.write(json.dumps(results[-1]) + '\n')
        with suppress(OSError):  # the terminal is closed
            print(
                f'{results[-1]["seconds"]:7.1f} s  {part.name}: {results[-1]["status"]}', flush=True
            )
    if clocks:
        stop(clocks)
    write_facts(out / 'end')
    notes = ['dry run on a CPU, so no value is of a GPU'] * IS_DRY + [reason] * bool(reason)
    title = '; '.join([f'{card}: {(time.monotonic() - start) / 60:.1f} minutes', *notes])
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
    minutes, variant = parser.parse_args().minutes, os.environ.get('MLPERF_RN50_VARIANT', '')
    found = re.match(
        r'(.+), (\d+)\.',
        output_of('nvidia-smi', '--query-gpu=name,compute_cap', '--format=csv,noheader'),
    )
    card, is_too_new = (
        found[1] if found else 'CPU',
        found and variant.startswith('cu') and int(found[2]) >= 9,
    )
    reason = (
        f"the MXNet of {variant} has no code for it, only that of NVIDIA's container"
        if is_too_new
        else ''
    )
    base = Path(os.environ.get('MLPERF_RN50_GPU_RESULT') or ROOT / 'logs')
    with tempfile.TemporaryDirectory() as work:
        return run_all(make_parts(variant == 'ngc', Path(work)), card, reason, minutes, base)


if __name__ == '__main__':
    sys.exit(main())
