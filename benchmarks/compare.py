"""Ours against other programs, in turn: medians, and their ratio to the fastest; what every comparison here calls."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS, TORCH = ROOT / '.venv/bin/python', ROOT / 'benchmarks/.venv/bin/python'
PEER = ROOT / 'benchmarks/torch_peer.py'
# As the launchers set it.
HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
ENVIRONMENT = {'OMP_NUM_THREADS': '2', **HUGE_PAGES}
# What helped torch most of what needs no other library.
BOUND = {**HUGE_PAGES, 'OMP_PROC_BIND': 'close'}


def of_precision(precision: str) -> list[str]:
    """Options of the network that belong to a precision on a CPU."""
    return ['--data.pad_to_4_channels', str(precision == 'bfloat16').lower(), '--model.fused_bn_relu', 'true']


def run_json(command: Sequence[object], folder: Path = ROOT, **variables: str) -> dict:
    """The JSON object that a program prints, on 2 threads."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=folder,
                          env={**os.environ, 'OMP_NUM_THREADS': '2', **variables})
    if done.returncode:
        sys.exit(f'{" ".join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-2000:]}')
    return json.loads(done.stdout[done.stdout.index('{'):])


def bench(*arguments: object, checkout: Path = ROOT) -> list[dict]:
    """The rows of the first table of `mlperf-rn50 bench`, of this checkout or of another one."""
    command = [ROOT / 'launch/bind.sh', OURS, '-m', 'mlperf_rn50', 'bench', *arguments, '--format', 'json']
    return run_json(command, checkout, PYTHONPATH=str(checkout), **ENVIRONMENT)['tables'][0]['rows']


def train_ours(config: Path, seed: int, *options: object, ranks: int = 1, checkout: Path = ROOT) -> dict:
    """Trains as a user of a checkout does: how the run ended, and Top-1 after every epoch."""
    with tempfile.TemporaryDirectory() as folder:
        command = ['launch/local.sh', '--ranks-per-node', ranks, '--config', config, '--run-dir', folder,
                   '--run.seed', seed, *options]
        done = subprocess.run([str(c) for c in command], cwd=checkout, capture_output=True, text=True)
        path = Path(folder) / 'metrics.jsonl'
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    end = lines[-1] if lines else {}
    if end.get('status') not in ('converged', 'aborted'):
        sys.exit(done.stderr)
    top1 = [m['num_top1'] / m['num_images'] for m in lines if m['event'] == 'eval']
    return {'time_to_train_s': end['time_to_train_s'], 'epochs': len(top1), 'top1': top1,
            'is_converged': end['status'] == 'converged'}


def train_torch(config: Path, seed: int, *options: object, **variables: str) -> dict:
    """Trains by the same configuration in torch; with --steps, some steps of it."""
    from mlperf_rn50.cli.train import make_parser
    from mlperf_rn50.config import to_tree
    from mlperf_rn50.options import resolve_config
    recipe = to_tree(resolve_config(config, [], make_parser()))
    data = ROOT / recipe['data']['dir']
    arrays = data.with_name(f'{data.name}_arrays')
    made = arrays / 'validation_labels.npy'
    if not made.exists() or made.stat().st_mtime < (data / 'manifest.json').stat().st_mtime:
        subprocess.run([OURS, ROOT / 'benchmarks/arrays.py', data, arrays], check=True)
    return run_json([TORCH, PEER, 'train', '--recipe', json.dumps(recipe), '--folder', arrays, '--seed', seed,
                     *options], **variables)


def compare(title: str, sides: dict[str, Callable[[], float]], rounds: int, target: float | None = None) -> None:
    """Measures every side `rounds` times in turn. The first is ours; it is compared with the fastest of the others.

    Those in brackets are shown with their own ratio, and not compared with.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure())
            print(f'round {number + 1}  {name:32s} {found[name][-1]:10.2f}', file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    ours = next(iter(medians.values()))
    for name, median in medians.items():
        print(f'{name:34s} median {median:10.2f}  of {" ".join(f"{v:.2f}" for v in found[name])}  {ours / median:.3f}')
    best = max(list(v for n, v in medians.items() if not n.startswith('('))[1:])
    print(f'{title}: ratio {ours / best:.3f}{f", wanted {target}" if target else ""}', flush=True)
