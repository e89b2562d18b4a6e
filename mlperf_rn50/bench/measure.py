"""Shared parts of all benches: session, timing, peaks, machine description and output of
results."""

import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mxnet as mx

import mlperf_rn50
from mlperf_rn50.answer import Answer, Cell, Table, number_cell
from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import device_context
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.environment import git_commit, host_facts, package_versions
from mlperf_rn50.system.out_of_memory import PROC, read_numbers
from mlperf_rn50.system.processor import omp_threads
from mlperf_rn50.text import plural
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

Row = dict[str, Any]  # of a table of results, by JSON key


@dataclass(frozen=True)
class Spread:
    median_s: float
    low_s: float
    high_s: float
    mean_s: float
    num: int

    @property
    def relative(self) -> float:
        """Half the interquartile range, as a fraction of the median."""
        return (self.high_s - self.low_s) / 2 / self.median_s if self.median_s else 0.0


def spread_of(seconds: Sequence[float]) -> Spread:
    """Return the statistics of one or more measurements."""
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, median, high = statistics.quantiles(several, n=4, method='inclusive')
    return Spread(
        median_s=median, low_s=low, high_s=high, mean_s=statistics.fmean(seconds), num=len(seconds)
    )


@dataclass(frozen=True)
class BenchSession:
    config: Config
    comm: Comm
    device_id: int | None
    heartbeat: Heartbeat
    num_warmup: int
    num: int

    @property
    def context(self) -> mx.Context:
        return device_context(self.device_id)

    def time(self, action: Callable[[], Any]) -> Spread:
        """Time an action that waits for its own completion."""
        seconds = []
        for _ in range(self.num_warmup + self.num):
            start = time.perf_counter()
            action()
            self.heartbeat.beat()
            seconds.append(time.perf_counter() - start)
        return spread_of(seconds[self.num_warmup :])


def with_local_batch(config: Config, size: int) -> Config:
    """Return a configuration for any number of ranks, with `size` images on each in a step of one
    pass."""
    return replace(
        config,
        train=replace(
            config.train,
            local_batch_size=size,
            global_batch_size=None,
            gradient_accumulation_steps=1,
        ),
        run=replace(config.run, num_nodes=None, ranks_per_node=None),
    )


def count_hosts(comm: Comm) -> int:
    """Return the number of hosts; all ranks call it together."""
    return comm.sum([comm.local_rank == 0])[0]


def peak_memory_bytes(device_id: int | None) -> int:
    """Return the peak resident set of this process or, with a GPU, the memory in use on the GPU."""
    if device_id is not None:
        free, total = mx.context.gpu_memory_info(device_id)
        return total - free
    return read_numbers(PROC / 'self/status')['VmHWM']


_MAX_NUMBER = 65_536  # in a list, such as a batch size


def parse_list(option: str, text: str, known: Sequence[str] = ()) -> list[str]:
    """Return the words of a list such as 'a,b'. Raise ConfigError for an empty or unknown one."""
    words = [w.strip() for w in text.split(',')]
    for word in words:
        if not word or known and word not in known:
            expected = f'one or more of {",".join(known)}' if known else 'a,b,…'
            raise ConfigError(f'{option}: got {word!r}, expected {expected}')
    return words


def parse_numbers(option: str, text: str, most: int = _MAX_NUMBER) -> list[int]:
    """Return the numbers of a list such as '8,16'. Raise ConfigError unless all are whole, above 0
    and at most `most`."""
    words = parse_list(option, text)
    for word in words:
        if not word.isdecimal() or not 0 < int(word) <= most:
            raise ConfigError(
                f'{option}: got {word}, expected whole numbers from 1 to {most:,}, such as 8,16'
            )
    return [int(w) for w in words]


def _describe_machine(num_hosts: int, device: str) -> dict[str, Any]:
    """Return hardware, versions and settings of the measurement."""
    host = host_facts()
    keys = ('hostname', 'cpu', 'cpu_cores', 'processor', 'gpus', 'memory_bytes', 'os')
    gpus = host['gpus'] if device == 'gpu' else []
    return {
        **{key: host[key] for key in keys},
        'gpus': gpus,
        'num_hosts': num_hosts,
        'omp_threads_per_rank': omp_threads(os.environ.get('OMP_NUM_THREADS', '')),
        'packages': package_versions(),
        **git_commit(),
    }


@dataclass(frozen=True)
class ResultTable:
    """A table of results."""

    title: str
    columns: str  # a line for each: JSON key, heading and format, two or more spaces apart
    rows: list[Row]
    note: str = ''

    @property
    def table(self) -> Table:
        """The table as text, with - for a value of None."""
        columns = [re.split(' {2,}', line.strip()) for line in self.columns.strip().splitlines()]
        rows = [
            tuple(
                Cell(row[key]) if form == 's' else number_cell(row[key], form)
                for key, _, form in columns
            )
            for row in self.rows
        ]
        head = tuple(heading for _, heading, _ in columns)
        return Table(self.title, head, rows, self.note)


def make_answer(
    kind: str, num_hosts: int, tables: Sequence[ResultTable], device: str = 'cpu'
) -> Answer:
    """Return the machine and the tables of a bench; as data, also all values of the rows.

    The machine's GPUs are named only if they are the measured device.
    """
    machine = _describe_machine(num_hosts, device)
    packages = machine['packages']
    mxnet = next((f'{n} {v}' for n, v in packages.items() if n.startswith('mxnet')), 'no MXNet')
    facts = [
        f'{machine["cpu"]} ({machine["processor"]["uses"]})',
        f'{machine["cpu_cores"]} cores',
        *machine['gpus'],
        f'{machine["omp_threads_per_rank"]} threads per rank',
        plural(num_hosts, 'host'),
    ]
    return Answer(
        sentences=[f'{", ".join(facts)}; mlperf-rn50 {packages["mlperf-rn50"]}, {mxnet}'],
        tables=[t.table for t in tables],
        data={
            'format': f'mlperf-rn50 bench {kind} 1',
            'version': mlperf_rn50.__version__,
            'machine': machine,
            'tables': [{'title': t.title, 'note': t.note, 'rows': t.rows} for t in tables],
        },
    )
