"""Predicts steps on 2, 4 and 8 hosts from the step of one and the all-reduce alone, and measures them.

Usage: sudo python benchmarks/predict_sweep.py [STEPS]

The hosts are network namespaces (tests/cluster) whose links tc shapes to 1 Gbit/s. Each is held to a share of a core,
so that a step computes as long on every host, however many share the cores of this machine. ResNet-50 on digits, 16
images a rank.
"""
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = (2, 4, 8)
RATE = ('rate', '1gbit', 'burst', '512kb', 'latency', '100ms')
CPUS_PER_HOST, PERIOD_US = 0.2, 20_000  # a short period, so that a rank that waits for its share waits little
GROUPS = Path('/sys/fs/cgroup')
VARIABLES = {'OMP_NUM_THREADS': '1', 'HOROVOD_CYCLE_TIME': '5', 'PYTHONPATH': str(ROOT),
             'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


@contextmanager
def limited(num_hosts: int) -> Iterator[Path]:
    """A control group per host, each with its share of a core; gives the beginning of their names."""
    is_v2 = (GROUPS / 'cgroup.controllers').exists()
    root = GROUPS / ('' if is_v2 else 'cpu')
    groups = [root / f'rn50-{os.getpid()}-h{i + 1}' for i in range(num_hosts)]
    quota_us = round(CPUS_PER_HOST * PERIOD_US)
    try:
        for group in groups:
            group.mkdir()
            if is_v2:
                (group / 'cpu.max').write_text(f'{quota_us} {PERIOD_US}')
            else:
                (group / 'cpu.cfs_period_us').write_text(str(PERIOD_US))
                (group / 'cpu.cfs_quota_us').write_text(str(quota_us))
        yield root / f'rn50-{os.getpid()}-'
    finally:
        for group in groups:
            group.rmdir()


def bench(cluster, groups: Path, num_hosts: int, kind: str, steps: int) -> dict:
    """What mlperf-rn50 bench says of some hosts, a rank on each."""
    hosts = ','.join(f'{h.name}:1' for h in cluster.hosts[:num_hosts])
    enter = f'echo $$ >{groups}$(hostname)/cgroup.procs; exec "$@"'
    # Over Gloo, whose ranks sleep while they wait; those of MPI would spend their host's share of a core on it.
    command = [ROOT / 'launch/engines/horovodrun.sh', hosts, 'bash', '-c', enter, 'bash', ROOT / '.venv/bin/python',
               '-m', 'mlperf_rn50', 'bench', kind, '--config', ROOT / 'launch/configs/digits_sweep.yaml',
               '--batch-sizes', '16', '--warmup-steps', '2', '--steps', steps, '--format', 'json']
    done = subprocess.run(cluster.hosts[0].inside(command), env={**cluster.environment(), **VARIABLES}, text=True,
                          capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout)


def predict(folder: Path, step: dict, exchange: dict, num_hosts: int) -> dict:
    """What mlperf-rn50 predict says of some hosts, from the files of the benches."""
    (folder / 'step.json').write_text(json.dumps(step))
    (folder / 'exchange.json').write_text(json.dumps(exchange))
    command = [sys.executable, '-m', 'mlperf_rn50', 'predict', folder / 'step.json', folder / 'exchange.json',
               '--layouts', f'{num_hosts}x1', '--local-batch-size', '16', '--format', 'json']
    done = subprocess.run(command, env={**os.environ, 'PYTHONPATH': str(ROOT)}, text=True, capture_output=True,
                          check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout)['predictions'][0]


def take_step(exchange: dict) -> float:
    """Takes the training step off what bench allreduce measured, so that no prediction reads it: milliseconds."""
    row = exchange['tables'][1]['rows'][0]
    step_ms = row.pop('step_ms')
    del row['measured_share'], row['predicted_share']
    return step_ms


def main(steps: int) -> None:
    sys.path.insert(0, str(ROOT / 'tests'))
    from cluster.hosts import Cluster
    print('| hosts | compute, ms | exchange, ms | predicted step, ms | measured, ms | error |')
    print('|---|---|---|---|---|---|')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = Cluster(folder, max(COUNTS))
        try:
            for host in cluster.hosts:
                host.call('tc', 'qdisc', 'replace', 'dev', 'eth0', 'root', 'tbf', *RATE)
            with limited(max(COUNTS)) as groups:
                step = bench(cluster, groups, 1, 'train', steps)
                for num_hosts in COUNTS:
                    exchange = bench(cluster, groups, num_hosts, 'allreduce', steps)
                    measured_ms = take_step(exchange)
                    row = predict(folder, step, exchange, num_hosts)
                    print(f'| {num_hosts} | {1e3 * row["compute_s"]:,.0f} | {1e3 * row["exchange_s"]:,.0f} | '
                          f'{1e3 * row["step_s"]:,.0f} | {measured_ms:,.0f} | '
                          f'{1e3 * row["step_s"] / measured_ms - 1:+.1%} |', flush=True)
        finally:
            cluster.close()


if __name__ == '__main__':
    os.chdir(ROOT)
    main(int(sys.argv[1]) if sys.argv[1:] else 12)
