"""Shared parts of all benches: session, timing, peaks, machine description and output of
results."""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from tabulate import tabulate

import mlperf_rn50
from mlperf_rn50.answer import number_cell
from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import device_context
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.environment import git_commit, host_facts, package_versions
from mlperf_rn50.system.out_of_memory import PROC, read_numbers
from mlperf_rn50.system.processor import omp_threads
from mlperf_rn50.text import plural, printable
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
    return Spread(median, low, high, statistics.fmean(seconds), len(seconds))


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
            seconds.append(time.perf_counter() - start)
        return spread_of(seconds[self.num_warmup :])


def peak_memory_bytes(device_id: int | None) -> int:
    """Return the peak resident set of this process or, with a GPU, the memory in use on the GPU."""
    if device_id is not None:
        free, total = mx.context.gpu_memory_info(device_id)
        return total - free
    return read_numbers(PROC / 'self/status')['VmHWM']


def parse_list(option: str, text: str, known: Sequence[str] | None = None) -> list[str]:
    """Return the words of a list such as 'a,b'. Raise ConfigError for an empty or unknown one."""
    words = [w.strip() for w in text.split(',')]
    for word in words:
        if not word or (known and word not in known):
            expected = f'one or more of {",".join(known)}' if known else 'a,b,…'
            raise ConfigError(f'{option}: got {word!r}, expected {expected}')
    return words


def parse_numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a list such as '8,16'. Raise ConfigError unless all are whole and above
    0."""
    words = parse_list(option, text)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(f'{option}: got {word}, expected whole numbers above 0, such as 8,16')
    return [int(w) for w in words]


def describe_machine(num_hosts: int) -> dict:
    """Return hardware, versions and settings of the measurement."""
    host, keys = (
        host_facts(),
        ('hostname', 'cpu', 'cpu_cores', 'processor', 'gpus', 'memory_bytes', 'os'),
    )
    return {
        **{key: host[key] for key in keys},
        'num_hosts': num_hosts,
        'omp_threads_per_rank': omp_threads(os.environ.get('OMP_NUM_THREADS', '')),
        'packages': package_versions(),
        **git_commit(),
    }


@dataclass(frozen=True)
class ResultTable:
    """A table of results. Columns are (JSON key, heading, format). A value of None is printed as
    -."""

    title: str
    columns: tuple[tuple[str, str, str], ...]
    rows: list[Row]
    note: str = ''


def render_tables(machine: dict, tables: Sequence[ResultTable]) -> str:
    packages = machine['packages']
    mxnet = next((f'{n} {v}' for n, v in packages.items() if n.startswith('mxnet')), 'no MXNet')
    description = ', '.join(
        [
            f'{machine["cpu"]} ({machine["processor"]["uses"]})',
            f'{machine["cpu_cores"]} cores',
            *machine['gpus'],
            f'{machine["omp_threads_per_rank"]} threads per rank',
            plural(machine['num_hosts'], 'host'),
        ]
    )
    lines = [f'{description}; mlperf-rn50 {packages["mlperf-rn50"]}, {mxnet}']
    for table in tables:
        body = [
            [
                printable(v) if isinstance(v := row[key], str) else number_cell(v, form).text
                for key, _, form in table.columns
            ]
            for row in table.rows
        ]
        lines += [
            '',
            table.title,
            tabulate(
                body,
                [heading for _, heading, _ in table.columns],
                disable_numparse=True,
                colalign=['left' if f == 's' else 'right' for *_, f in table.columns],
            ),
        ]
        lines += [table.note] * bool(table.note)
    return '\n'.join(lines)


def render_results_json(kind: str, machine: dict, tables: Sequence[ResultTable]) -> str:
    """Return the machine and all tables with title, note and rows as JSON."""
    return json.dumps(
        {
            'format': f'mlperf-rn50 bench {kind} 1',
            'version': mlperf_rn50.__version__,
            'machine': machine,
            'tables': [{'title': t.title, 'note': t.note, 'rows': t.rows} for t in tables],
        },
        indent=1,
    )
