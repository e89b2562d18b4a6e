"""The exchange of all GPUs, one rank each and two each: every method of Comm, and sums of the size of a step."""
import json
import os
import sys

import pytest
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


@pytest.mark.parametrize('ranks_per_device', [1, 2])
def test_sums_of_all_ranks(ranks_per_device, num_gpus, tmp_path, figure):
    n = num_gpus * ranks_per_device if not IS_DRY else 2
    if n < 2:
        pytest.skip('one rank has nobody to exchange with')
    found = on_ranks(tmp_path, n, ranks_per_device)
    if not IS_DRY:
        assert [f['device'] for f in found] == [r // ranks_per_device for r in range(n)]
    for r, got in enumerate(found):
        assert got['collectives']['rank'] == r and got['collectives']['world_size'] == n
        assert got['collectives']['grads'] == [[sum(range(1, n + 1))] * 4, [10.0 * sum(range(1, n + 1))] * 4]
        assert got['collectives']['broadcast'] == [[10.0, 10.0], [0.0, 0.0, 0.0]]
        assert got['collectives']['mean'] == [(n - 1) / 2] * 2
        assert got['collectives']['counts'] == [sum(range(n)), n * 2**40, 1]
        assert got['large sums, float32'] == [0] * 6 and got['large sums, float16'] == [0] * 6
    figure(f'exchange of {n} ranks, {ranks_per_device} on a GPU: wrong sums', 0, 'sums')
