"""The exchange of all GPUs, one rank each and two each: every method of Comm, and sums of the size of a step."""
import json
import os
import sys

from gpu.conftest import IS_DRY
from helpers import ROOT, run, under_ranks


def on_ranks(folder, num_ranks, ranks_per_device):
    """What each rank found."""
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT}/tests',
                   'MLPERF_RN50_RANKS_PER_DEVICE': str(ranks_per_device)}
    done = run(under_ranks(num_ranks, [sys.executable, ROOT / 'tests/gpu/workers.py', folder,
                                       'cpu' if IS_DRY else 'gpu', ranks_per_device]), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f'{r}.json').read_text()) for r in range(num_ranks)]


def test_sums_of_all_ranks(ranks_per_device, num_ranks, tmp_path, figure):
    n = num_ranks
    found = on_ranks(tmp_path, n, ranks_per_device)
    if not IS_DRY:
        assert [f['device'] for f in found] == [r // ranks_per_device for r in range(n)]
    for r, got in enumerate(found):
        expected = {'rank': r, 'world_size': n, 'broadcast': [[10.0, 10.0], [0.0, 0.0, 0.0]], 'mean': [(n - 1) / 2] * 2,
                    'grads': [[sum(range(1, n + 1))] * 4, [10.0 * sum(range(1, n + 1))] * 4],
                    'counts': [sum(range(n)), n * 2**40, 1]}
        assert {key: got['collectives'][key] for key in expected} == expected
        assert got['large sums, float32'] == got['large sums, float16'] == [0] * 6
    figure(f'exchange of {n} ranks, {ranks_per_device} on a GPU: wrong sums', 0, 'sums')
