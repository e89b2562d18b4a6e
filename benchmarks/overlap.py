"""How much of the gradient exchange hides behind backward. Usage: sudo python benchmarks/overlap.py [BATCH...]

Two hosts (network namespaces of tests/cluster, a core each, Open MPI over TCP) whose links tc shapes to some rates;
ResNet-50, 224x224, float32, made-up images. Steps with one bucket and with the default number take turns; the exchange
alone is timed after a backward that was waited for. Rates take turns as well.
"""
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATES = ['', '10gbit', '1gbit', '500mbit']  # '': not shaped
ROUNDS = {8: 5, 32: 2}


def shape(rate: str) -> None:
    """Shapes what this host sends."""
    change = ['replace', 'dev', 'eth0', 'root', 'tbf', 'rate', rate, 'burst', '512kb', 'latency', '100ms']
    subprocess.run(['tc', 'qdisc', *(change if rate else ['del', 'dev', 'eth0', 'root'])], capture_output=True,
                   check=False)


def take_turns(batch: int) -> None:
    """One rank: measures; as rank 0, prints the medians in ms of a step with one bucket, with the default, and of the
    exchange alone, a line per rate."""
    import mxnet as mx

    from mlperf_rn50.config import CommConfig, Config, ModelConfig, TrainConfig
    from mlperf_rn50.data.pipeline import made_up_batches
    from mlperf_rn50.train.comm import open_comm
    from mlperf_rn50.train.optimizer import Optimizer
    from mlperf_rn50.train.plan import make_plan
    from mlperf_rn50.train.trainer import Trainer
    config = Config(model=ModelConfig(fused_bn_relu=True), train=TrainConfig(local_batch_size=batch))
    comm = open_comm('none')
    plan = make_plan(config, comm.world_size)
    trainer = Trainer(plan, comm, 0, None)
    params = {n: p for n, p in trainer.net.collect_params().items() if p.grad_req != 'null'}
    optimizers = {n: Optimizer(params, config.optimizer, n) for n in (1, CommConfig.num_buckets)}
    batches = made_up_batches(config, plan.train_shard(comm.rank), None)

    def timed(work: Callable[[], object]) -> float:
        mx.nd.waitall()
        comm.barrier()
        start = time.perf_counter()
        work()
        mx.nd.waitall()
        return 1000 * (time.perf_counter() - start)

    def measure() -> list[float]:
        found = []
        for trainer.optimizer in optimizers.values():
            found.append(timed(lambda: trainer.step(batches, 0, 1e-6, False)))
        trainer.optimizer = optimizers[1]
        loss = trainer.forward(next(batches))
        loss.backward()
        return [*found, timed(partial(trainer.exchange, loss.detach().sum(), 0, False))]
    measure()
    found: dict[str, list[list[float]]] = {rate: [] for rate in RATES}
    for _ in range(ROUNDS.get(batch, 3)):
        for rate in RATES:
            shape(rate)
            found[rate].append(measure())
    if comm.rank == 0:
        for rows in found.values():
            print('found', *(f'{statistics.median(column):.0f}' for column in zip(*rows)), flush=True)


def on_two_hosts(cluster, batch: int) -> list[list[float]]:
    """What take_turns printed."""
    variables = {'OMP_NUM_THREADS': '1', 'HOROVOD_CYCLE_TIME': '5', 'PYTHONPATH': str(ROOT),
                 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    core = 'exec taskset -c $(( $(hostname | tr -d h) - 1 )) "$@"'
    command = [ROOT / '.venv/bin/mpirun', '--allow-run-as-root', '--quiet', '--bind-to', 'none',
               *('--mca mpi_yield_when_idle 1 --mca pml ob1 --mca btl tcp,self --host h1:1,h2:1 -np 2'.split()),
               *(w for name in variables for w in ('-x', name)),
               'bash', '-c', core, 'bash', ROOT / '.venv/bin/python', __file__, 'rank', batch]
    done = subprocess.run(cluster.hosts[0].inside(command), env={**cluster.environment(), **variables}, text=True,
                          capture_output=True, check=False)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith('found')]
    if not lines:
        sys.exit(done.stdout + done.stderr)
    return [[float(v) for v in line] for line in lines]


def main(batches: list[int]) -> None:
    sys.path.insert(0, str(ROOT / 'tests'))
    from cluster.hosts import Cluster
    print('| batch | link | one bucket, ms | default, ms | exchange alone, ms | hidden of what the link adds to it |')
    print('|---|---|---|---|---|---|')
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), 2)
        try:
            for batch in batches:
                rows = on_two_hosts(cluster, batch)
                for rate, found in zip(RATES, rows):
                    one, own, added = (a - b for a, b in zip(found, rows[0]))
                    hidden = f'{1 - own / added:.0%} (one bucket {1 - one / added:.0%})' if added > 100 else ''
                    print(f'| {batch} | {rate or "not shaped"} | {" | ".join(f"{v:,.0f}" for v in found)} | {hidden} |',
                          flush=True)
        finally:
            cluster.close()


if __name__ == '__main__':
    os.chdir(ROOT)
    if sys.argv[1:2] == ['rank']:
        take_turns(int(sys.argv[2]))
    else:
        main([int(n) for n in sys.argv[1:]] or list(ROUNDS))
