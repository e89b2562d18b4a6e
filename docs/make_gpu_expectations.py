"""Writes tests/gpu/expectations.json and the tables of docs/gpu.md: what published systems train per second and GPU.

  python docs/make_gpu_expectations.py           writes both
  python docs/make_gpu_expectations.py --check   ends with 1 where one of them is not current

From the table of published systems in the package (mlperf_rn50/study/published.json) and, where they ran what bench
train runs, from the vendor's own tables, which are quoted below with their address.
"""
import json
import sys
from pathlib import Path

from mlperf_rn50.mlperf.run import IMAGENET_TRAIN
from mlperf_rn50.study.known import KnownSet, load_published

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tests'))
from gpu.page import kind_of  # noqa: E402

PAGE, DATA = ROOT / 'docs/gpu.md', ROOT / 'tests/gpu/expectations.json'
# bench train on made-up images waits for no input and, on one GPU, for no other; it may still differ by the clocks,
# cooling and power limit of a card.
LOW, HIGH = 0.9, 1.15
SOURCE = ('MLPerf Training results, github.com/mlcommons/training_results_v0.5, v0.6, v0.7 and v1.0: the systems that '
          'ran ResNet-50 on MXNet and GPUs')
VENDOR_SOURCE = ('github.com/NVIDIA/DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md, "Training '
                 'performance results": images/s in total with the input pipeline')
# (kind of card, system, container, GPUs, images per GPU, mixed precision, float32 or TF32)
VENDOR = [('V100', 'DGX-1, V100 16 GB', '20.12', 1, 192, 1376, 384),
          ('V100', 'DGX-1, V100 16 GB', '20.12', 8, 192, 10723, 3005),
          ('V100', 'DGX-2, V100 32 GB', '20.12', 1, 256, 1492, 417),
          ('V100', 'DGX-2, V100 32 GB', '20.12', 16, 256, 21484, 6338),
          ('A100 SXM 80GB', 'DGX A100, A100 80 GB', '22.10', 1, 512, 3410.52, 1055.78),
          ('A100 SXM 80GB', 'DGX A100, A100 80 GB', '22.10', 8, 512, 26673.72, 8247.44)]


def system_of(known: KnownSet) -> dict:
    """The figures of a published system, images per second and GPU."""
    gpus, runs = known.num_accelerators, known.converged
    ends = [r.epochs * IMAGENET_TRAIN / r.time_s / gpus for r in runs]
    return {'round': known.round, 'org': known.org, 'system': known.name, 'num_nodes': known.num_nodes,
            'num_gpus': gpus, 'card': known.accelerator, 'kind': kind_of(known.accelerator),
            'images_per_gpu': known.recipe.global_batch_size / gpus, 'framework': known.framework,
            'full_speed': round(IMAGENET_TRAIN / known.times.epoch_s / gpus, 1),
            'end_to_end': [round(min(ends), 1), round(max(ends), 1)], 'num_runs': len(runs)}


def make_expectations() -> dict:
    """Everything of expectations.json."""
    systems = [system_of(k) for k in load_published() if k.num_accelerators]
    kinds = {}
    for kind in sorted({s['kind'] for s in systems}):
        single = [s for s in systems if s['kind'] == kind and s['num_nodes'] == 1]
        speeds = [s['full_speed'] for s in single]
        kinds[kind] = {'full_speed': [min(speeds), max(speeds)],
                       'end_to_end': [min(s['end_to_end'][0] for s in single), max(s['end_to_end'][1] for s in single)],
                       'bench_train': [round(LOW * min(speeds)), round(HIGH * max(speeds))], 'num_systems': len(single)}
    vendor = [dict(zip(('kind', 'system', 'container', 'num_gpus', 'images_per_gpu', 'mixed', 'float32'), row))
              for row in VENDOR]
    return {'format': 'mlperf-rn50 gpu expectations 1', 'source': SOURCE, 'vendor_source': VENDOR_SOURCE,
            'unit': 'images/s per GPU; vendor: images/s of all GPUs', 'kinds': kinds, 'systems': systems,
            'vendor': vendor}


def _row(*cells) -> str:
    return f'| {" | ".join(str(c) for c in cells)} |'


def _range(pair) -> str:
    low, high = (f'{v:,.0f}' for v in pair)
    return low if low == high else f'{low} to {high}'


def _kinds(found: dict) -> list[str]:
    head = ['card', 'systems of one node', 'at full speed', 'with evaluation and start', '`bench train` should print']
    rows = [_row(kind, k['num_systems'], _range(k['full_speed']), _range(k['end_to_end']), _range(k['bench_train']))
            for kind, k in found['kinds'].items()]
    return [_row(*head), '|---|---|---|---|---|', *rows]


def _systems(found: dict) -> list[str]:
    head = ['round', 'system', 'nodes x GPUs', 'card', 'images per GPU', 'at full speed', 'with evaluation and start']
    order = sorted(found['systems'], key=lambda s: (s['num_nodes'] > 1, s['kind'], s['round'], s['org'], s['system']))
    rows = [_row(s['round'], f'{s["org"]} {s["system"]}', f'{s["num_nodes"]} x {s["num_gpus"] // s["num_nodes"]}',
                 s['card'], f'{s["images_per_gpu"]:g}', f'{s["full_speed"]:,.0f}', _range(s['end_to_end']))
            for s in order]
    return [_row(*head), '|---|---|---|---|---|---|---|', *rows]


def _vendor(found: dict) -> list[str]:
    head = ['system', 'container', 'GPUs', 'images per GPU', 'mixed precision, per GPU',
            'float32 (A100: TF32), per GPU']
    rows = [_row(v['system'], v['container'], v['num_gpus'], v['images_per_gpu'],
                 *(f'{v[key] / v["num_gpus"]:,.0f}' for key in ('mixed', 'float32'))) for v in found['vendor']]
    return [_row(*head), '|---|---|---|---|---|---|', *rows]


TABLES = {'kinds': _kinds, 'systems': _systems, 'vendor': _vendor}


def fill_page(text: str, found: dict) -> str:
    """The page with each table between its two marks."""
    for name, make in TABLES.items():
        begin, end = f'<!-- table: {name} -->\n', f'<!-- end: {name} -->'
        before, _, rest = text.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise SystemExit(f'{PAGE}: the marks of {name} are missing')
        text = before + begin + '\n'.join(make(found)) + '\n' + end + after
    return text


def main() -> int:
    found = make_expectations()
    wanted = {DATA: json.dumps(found, indent=1) + '\n', PAGE: fill_page(PAGE.read_text(), found)}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    if '--check' in sys.argv[1:]:
        for path in stale:
            print(f'{path.relative_to(ROOT)} is not current; run: python docs/make_gpu_expectations.py',
                  file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == '__main__':
    sys.exit(main())
