"""Sets of five runs that the official checkers accept, as a submission is made of."""
import json
import re
from dataclasses import replace
from functools import partial

from lines import quiet
from sample_log import SGD, write_run

SEED = 4_242_424_242  # of the logs that others are made from
ENV = {'git_commit': None, 'packages': {'mxnet-cu117': '1.9.1', 'horovod': '0.28.1'}, 'num_nodes': 2,
       'nodes': [{'hostname': 'alpha', 'num_ranks': 4}, {'hostname': 'beta', 'num_ranks': 4}],
       'host': {'hostname': 'alpha', 'os': 'Linux-6', 'os_name': 'Debian GNU/Linux 12', 'memory_bytes': 512_000_000_000,
                'gpus': ['V100'] * 4, 'hardware': {
                    'cpu': {'model': 'Xeon', 'sockets': 2, 'cores_per_socket': 20, 'threads_per_core': 2,
                            'max_mhz': 3700.0, 'caches': 'L3 55 MiB'},
                    'storage': [{'kind': 'NVMe SSD', 'model': 'x', 'bytes': 1_600_000_000_000}] * 2,
                    'networks': [{'name': 'mlx5_0', 'rate': '100 Gb/sec'}],
                    'gpus': [{'name': 'V100', 'memory.total': '32510 MiB', 'clocks.max.sm': '1530 MHz'}] * 4}},
       'variables': {'CUDA_CACHE': '/home/me/cache'}}


def at_another_pace(log, extra_ms):
    """A log whose every line takes some milliseconds longer, as no two runs have the same times."""
    def later(line, match):
        digits = match[2]
        return match[1] + (f'{float(digits) + line * extra_ms / 1e3:.6f}' if '.' in digits else
                           str(int(digits) + line * extra_ms))
    time = re.compile(r'("time_ms": |:::MLL |:::MLPv0\.5\.0 resnet )(\d+(?:\.\d+)?)')
    return ''.join(time.sub(partial(later, i), line)
                   for i, line in enumerate(log.splitlines(keepends=True)))


def write_five(folder, config=SGD, num=5, seeds=range(1, 9), env=ENV, ends=(), **keys):
    """A set of runs in a new folder, with env.json and config.yaml."""
    folder.mkdir(parents=True)
    for k in range(num):
        end = ends[k] if k < len(ends) else 'converged'
        path = write_run(folder / f'result_{k}.txt', config, end=end, seed=SEED, **keys)
        path.write_text(at_another_pace(path.read_text().replace(str(SEED), str(seeds[k])), k))
        quiet(path)
        (folder / f'env{f"_{k}" if k else ""}.json').write_text(json.dumps(env))
        (folder / f'config{f"_{k}" if k else ""}.yaml').write_text('data:\n  dir: /home/me/imagenet\n')
    return folder


def closed(config):
    """The same configuration for the closed division."""
    return replace(config, run=replace(config.run, submission_division='closed'))
