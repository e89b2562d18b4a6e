"""Checks of the facts that doctor/facts.py gathers on each rank. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlperf_rn50.doctor import gpu_stack
from mlperf_rn50.doctor.machine import check_limits
from mlperf_rn50.doctor.result import Check, RankFacts, by_node, hosts_of
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.processor import check_precision
from mlperf_rn50.text import grouped, plural

_MAX_CLOCK_SKEW_S = 1.0
_SET_UP = 'run launch/setup.sh on {}'


def _same(
    name: str,
    rows: Sequence[RankFacts],
    value: Callable[[RankFacts], str],
    fix: str,
    shown: str = '',
) -> Check:
    """Check that all ranks have the same value, which the result shows unless `shown` is given.
    Otherwise it names the hosts that differ from the majority."""
    by_value = grouped(rows, value)
    if len(by_value) == 1:
        return Check(name, 'ok', shown or f'{value(rows[0])} on all ranks')
    usual = max(by_value, key=lambda v: len(by_value[v]))
    usual_hosts = hosts_of(by_value.pop(usual))
    differences = '; '.join(f'{v} on {hosts_of(rs)}' for v, rs in by_value.items())
    found = f'{differences}, but {usual} on {usual_hosts}'
    return Check(name, 'failed', found, fix.format(hosts_of(sum(by_value.values(), []))))


def _packages(rows: Sequence[RankFacts]) -> Check:
    names = sorted({n for r in rows for n in r.packages})
    differing = [n for n in names if len({r.packages.get(n) for r in rows}) > 1]
    first = rows[0].packages
    main = [f'{n} {first[n]}' for n in names if n.startswith(('mxnet', 'horovod', 'numpy'))]
    return _same(
        'packages',
        rows,
        lambda r: ', '.join(f'{n} {r.packages.get(n, "missing")}' for n in differing),
        shown=f'{", ".join(main)} on all ranks',
        fix=_SET_UP,
    )


def _processor(rows: Sequence[RankFacts], precision: str) -> Check:
    """Check that processors support the precision. Warn if they differ, because each step waits for
    the slowest."""
    name = 'processor'

    def text(row: RankFacts) -> str:
        return f'{row.processor.name}, {row.processor.uses}'

    for row in rows:
        try:
            check_precision('train.precision', precision, row.processor)
        except ConfigError as e:
            return Check(name, 'failed', f'{text(row)} on {row.host}', str(e))
    same = _same(name, rows, text, 'each step waits for the slowest processor')
    return replace(same, status='warning') if same.status == 'failed' else same


def _layers(rows: Sequence[RankFacts]) -> Check:
    by_text = grouped(rows, lambda r: r.layers)
    if len(by_text) == 1:
        return Check('layers', 'ok', rows[0].layers)
    texts = [f'{text} on {hosts_of(rs)}' for text, rs in by_text.items()]
    return Check('layers', 'ok', '; '.join(texts))


def _horovod(rows: Sequence[RankFacts], device: str) -> Check:
    horovod = rows[0].horovod
    if not horovod.operations:
        return Check('Horovod', 'not needed', horovod.in_use)
    variant = 'ngc' if rows[0].mxnet.kind == 'container' else 'cu117'
    lacks_nccl = device == 'gpu' and 'NCCL' not in horovod.operations
    return Check(
        'Horovod',
        'failed' if lacks_nccl else 'ok',
        f'controllers {"+".join(horovod.controllers) or "none"}, operations '
        f'{"+".join(horovod.operations)}, this run: {horovod.in_use}',
        f'install a Horovod built with NCCL: MLPERF_RN50_VARIANT={variant} launch/setup.sh',
    )


def _layout(rows: Sequence[RankFacts], num_nodes: int | None, ranks_per_node: int | None) -> Check:
    nodes = [r for r in rows if r.local_rank == 0]
    counts = [f'{r.host}: {r.local_size}' for r in nodes[:8]]
    if len(nodes) > 8:
        counts.append('…')
    layout = f'{plural(len(rows), "rank")} on {plural(len(nodes), "node")} ({", ".join(counts)})'
    fix = ''
    if num_nodes not in (None, len(nodes)):
        fix = f'run.num_nodes is {num_nodes}; start ranks on {num_nodes} hosts'
    elif other := [r for r in nodes if ranks_per_node not in (None, r.local_size)]:
        first = other[0]
        fix = f'run.ranks_per_node is {ranks_per_node}, but {first.host} has {first.local_size}'
    return Check('ranks and nodes', 'failed' if fix else 'ok', layout, fix)


def _data(rows: Sequence[RankFacts]) -> list[Check]:
    name = 'data set'
    first = rows[0].data
    if first is None:
        return [Check(name, 'not needed', 'synthetic images, or no configuration')]
    for row in rows:
        if row.data and row.data.problem:
            problem, _, fix = row.data.problem.partition('; ')
            verify = 'check every record with: mlperf-rn50 prepare --verify DIR'
            return [Check(name, 'failed', f'on {row.host}: {problem}', fix or verify)]

    def text(row: RankFacts) -> str:
        return f'manifest {row.data.manifest} with {row.data.num_images} images' if row.data else ''

    shown = f'{first.dataset}, {first.num_images} images, the same manifest on all ranks'
    same = _same(name, rows, text, fix='copy the prepared folder to {} again', shown=shown)
    how = 'without checksums, because an earlier version prepared the folder'
    if first.has_checksums:
        how = 'with their checksums'
    probed = f'{first.num_probed} records checked on each rank, {how}'
    return [same, Check('.idx and .rec', 'ok', probed)]


def _disk(rows: Sequence[RankFacts], needed_bytes: int) -> Check:
    # rank 0 writes, and the folder may be on a disk of its host
    seen = [r for r in rows[1:] if r.run_folder_problem == '']
    row = min([rows[0], *seen], key=lambda r: r.disk_free_bytes)
    return Check(
        'disk',
        'ok' if row.disk_free_bytes >= needed_bytes else 'failed',
        f'{row.disk_free_bytes / 1e9:.1f} GB free for the run folder on {row.host}, '
        f'{needed_bytes / 1e9:.1f} GB needed',
        'free space, or change run.dir or checkpoint.keep',
    )


def _run_folder(rows: Sequence[RankFacts]) -> Check:
    """Check that rank 0 can write to the run folder. Warn if hosts do not see it, because --resume
    needs it."""
    name = 'run folder'
    problem = rows[0].run_folder_problem
    host = rows[0].host
    if problem is None:
        return Check(name, 'not needed', 'one host')
    if problem:
        found = f'{problem} on {host}, which writes the files of the run'
        return Check(name, 'failed', found, 'choose a writable run.dir')
    if blind := [r for r in rows if r.run_folder_problem]:
        return Check(
            name,
            'warning',
            f'files of {host} are not visible on {hosts_of(blind)} ({blind[0].run_folder_problem})',
            'put run.dir on a shared file system; otherwise telemetry '
            'stays on each host, and --resume finds no run on these hosts',
        )
    return Check(name, 'ok', f'visible on all {len(by_node(rows))} hosts')


def _num_metered(node: Sequence[RankFacts], kind: str) -> int:
    """Return how many devices of a node telemetry meters: no GPUs if its rank can open only some of
    those in use."""
    used = {g.bus_id or g.uuid for r in node for g in r.used_gpus}
    is_part = kind == 'gpu' and node[0].num_open_gpus < len(used)
    return 0 if is_part else node[0].energy[kind]


def _energy(rows: Sequence[RankFacts]) -> Check:
    nodes = by_node(rows)
    texts = []
    for kind, name in (('cpu', 'CPU packages'), ('gpu', 'GPUs')):
        counts = [_num_metered(node, kind) for node in nodes]
        count = sum(counts)
        blind = [node[0] for node, number in zip(nodes, counts) if not number]
        if count:
            none = f', none on {hosts_of(blind)}, so there is no total' if blind else ''
            texts.append(f'{count} {name} can be measured{none}')
    if texts:
        return Check('energy', 'ok', '; '.join(texts) + ' (run.telemetry)')
    found = 'not measured; no readable counters (powercap needs root, GPUs need NVML)'
    return Check('energy', 'not needed', found)


def _clocks(rows: Sequence[RankFacts]) -> Check:
    # the most exact offset of each host
    hosts = [min(node, key=lambda r: abs(r.clock_offset_s)) for node in by_node(rows)]
    hosts.sort(key=lambda r: r.clock_offset_s)
    first, last = hosts[0], hosts[-1]
    skew_s = last.clock_offset_s - first.clock_offset_s
    # the median; of two, that nearer to rank 0
    middle = hosts[(len(hosts) - 1) // 2 : len(hosts) // 2 + 1]
    usual_s = min((r.clock_offset_s for r in middle), key=abs)
    wrong = max(hosts, key=lambda r: (abs(r.clock_offset_s - usual_s), r.rank))
    return Check(
        'clocks',
        'ok' if skew_s <= _MAX_CLOCK_SKEW_S else 'failed',
        f'at most {1e3 * skew_s:.0f} ms apart ({first.host} and {last.host})',
        f'set the clock of {wrong.host}, for example with chrony',
    )


def _all_reduce(rows: Sequence[RankFacts]) -> Check:
    if len(rows) == 1:
        return Check('all-reduce', 'not needed', 'one rank')
    size = rows[0].all_reduce_bytes
    seconds = max(r.all_reduce_s for r in rows)
    bandwidth = size / seconds
    bus = bandwidth * 2 * (len(rows) - 1) / len(rows)
    return Check(
        'all-reduce',
        'ok',
        f'{size / 1e6:.0f} MB in {1e3 * seconds:.0f} ms: {bandwidth / 1e9:.2f} GB/s, '
        f'bus {bus / 1e9:.2f} GB/s',
    )


def check_facts(
    rows: Sequence[RankFacts],
    device: str = 'cpu',
    precision: str = 'float32',
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
    needed_disk_bytes: int = 0,
) -> list[Check]:
    """Compare the facts of all ranks (rank 0 first) with each other and with a configuration's
    requirements."""
    first = rows[0]
    checks = [
        _same(
            'program',
            rows,
            lambda r: f'code {r.code}',
            fix='check out the same commit on {}',
        ),
        _same(
            'configuration',
            rows,
            lambda r: f'digest {r.config}',
            fix='copy the configuration file to {} again',
        ),
        _same('Python', rows, lambda r: r.python, _SET_UP, shown=first.python),
        _packages(rows),
        _processor(rows, precision),
        _layers(rows),
        gpu_stack.check_gpus(rows, device),
        gpu_stack.check_libraries(rows, device),
    ]
    if device == 'gpu':
        checks += [gpu_stack.check_environment(rows), gpu_stack.check_trial(rows)]
    return [
        *checks,
        Check('DALI', 'ok', f'{first.dali} imports'),
        _horovod(rows, device),
        _layout(rows, num_nodes, ranks_per_node),
        *_data(rows),
        _disk(rows, needed_disk_bytes),
        _run_folder(rows),
        *check_limits(rows, device),
        _energy(rows),
        _clocks(rows),
        _all_reduce(rows),
    ]


def has_failed(checks: Sequence[Check]) -> bool:
    """Return whether any check failed. Warnings do not count."""
    return any(c.status == 'failed' for c in checks)
