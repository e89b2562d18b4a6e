"""Checks of the facts that doctor/facts.py gathers on each rank. Pure functions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlperf_rn50.doctor import gpu_stack
from mlperf_rn50.doctor.machine import check_limits
from mlperf_rn50.doctor.result import Check, Facts, by_node, hosts_of
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.processor import Processor, check_precision
from mlperf_rn50.text import grouped, plural

_MAX_CLOCK_SKEW_S = 1.0


def _same(
    name: str, rows: Sequence[Facts], value: Callable[[Facts], str], shown: str, fix: str
) -> Check:
    """Check that all ranks have the same value. The result names the hosts that differ from the
    majority."""
    by_value = grouped(rows, value)
    if len(by_value) == 1:
        return Check(name, 'ok', shown)
    usual = max(by_value, key=lambda v: len(by_value[v]))
    usual_rows = by_value.pop(usual)
    differences = '; '.join(f'{v} on {hosts_of(rs)}' for v, rs in by_value.items())
    return Check(
        name,
        'failed',
        f'{differences}, but {usual} on {hosts_of(usual_rows)}',
        fix.format(hosts_of([r for rs in by_value.values() for r in rs])),
    )


def _packages(rows: Sequence[Facts]) -> Check:
    names = sorted({n for r in rows for n in r['packages']})
    differing = [n for n in names if len({r['packages'].get(n) for r in rows}) > 1]
    first = rows[0]['packages']
    main = ', '.join(
        f'{n} {first[n]}' for n in names if n.startswith(('mxnet', 'horovod', 'numpy'))
    )
    return _same(
        'packages',
        rows,
        lambda r: ', '.join(f'{n} {r["packages"].get(n, "missing")}' for n in differing),
        f'{main} on all ranks',
        'run launch/setup.sh on {}',
    )


def _processor(rows: Sequence[Facts], precision: str) -> Check:
    """Check that processors support the precision. Warn if they differ, because each step waits for
    the slowest."""
    cpus = [Processor(**r['processor']) for r in rows]
    for row, processor in zip(rows, cpus):
        try:
            check_precision('train.precision', precision, processor)
        except ConfigError as e:
            return Check(
                'processor',
                'failed',
                f'{processor.name}, {processor.uses} on {row["host"]}',
                str(e),
            )
    same = _same(
        'processor',
        rows,
        lambda r: f'{r["processor"]["name"]}, {r["processor"]["uses"]}',
        f'{cpus[0].name}, {cpus[0].uses} on all ranks',
        'each step waits for the slowest processor',
    )
    return replace(same, status='warning') if same.status == 'failed' else same


def _layers(rows: Sequence[Facts]) -> Check:
    by_text = grouped(rows, lambda r: r['layers'])
    return Check(
        'layers',
        'ok',
        '; '.join(f'{text} on {hosts_of(rs)}' for text, rs in by_text.items())
        if len(by_text) > 1
        else rows[0]['layers'],
    )


def _horovod(rows: Sequence[Facts], device: str) -> Check:
    horovod = rows[0]['horovod']
    if not horovod['operations']:
        return Check('Horovod', 'not needed', horovod['in_use'])
    variant = 'ngc' if rows[0]['mxnet']['kind'] == 'container' else 'cu117'
    lacks_nccl = device == 'gpu' and 'NCCL' not in horovod['operations']
    return Check(
        'Horovod',
        'failed' if lacks_nccl else 'ok',
        f'controllers {"+".join(horovod["controllers"]) or "none"}, operations '
        f'{"+".join(horovod["operations"])}, this run: {horovod["in_use"]}',
        f'install a Horovod built with NCCL: MLPERF_RN50_VARIANT={variant} launch/setup.sh',
    )


def _layout(rows: Sequence[Facts], num_nodes: int | None, ranks_per_node: int | None) -> Check:
    nodes = [r for r in rows if r['local_rank'] == 0]
    counts = ', '.join(f'{r["host"]}: {r["local_size"]}' for r in nodes[:8]) + (
        ', …' if len(nodes) > 8 else ''
    )
    layout = f'{plural(len(rows), "rank")} on {plural(len(nodes), "node")} ({counts})'
    fixes = [f'run.num_nodes is {num_nodes}; start ranks on {num_nodes} hosts'] * (
        num_nodes not in (None, len(nodes))
    )
    fixes += [
        f'run.ranks_per_node is {ranks_per_node}, but {r["host"]} has {r["local_size"]}'
        for r in nodes
        if ranks_per_node not in (None, r['local_size'])
    ]
    return Check('ranks and nodes', 'failed' if fixes else 'ok', layout, fixes[0] if fixes else '')


def _data(rows: Sequence[Facts]) -> list[Check]:
    if rows[0]['data'] is None:
        return [Check('data set', 'not needed', 'synthetic images, or no configuration')]
    for row in rows:
        if row['data']['problem']:
            problem, _, fix = row['data']['problem'].partition('; ')
            return [
                Check(
                    'data set',
                    'failed',
                    f'on {row["host"]}: {problem}',
                    fix or 'check every record with: mlperf-rn50 prepare --verify DIR',
                )
            ]
    first = rows[0]['data']
    same = _same(
        'data set',
        rows,
        lambda r: f'manifest {r["data"]["manifest"]} with {r["data"]["num_images"]} images',
        f'{first["dataset"]}, {first["num_images"]} images, the same manifest on all ranks',
        'copy the prepared folder to {} again',
    )
    return [
        same,
        Check(
            '.idx and .rec',
            'ok',
            f'{first["num_probed"]} records checked on each rank, '
            + (
                'with their checksums'
                if first['has_checksums']
                else 'without checksums, because an earlier version prepared the folder'
            ),
        ),
    ]


def _disk(rows: Sequence[Facts], needed_bytes: int) -> Check:
    row = min(rows, key=lambda r: r['disk_free_bytes'])
    return Check(
        'disk',
        'ok' if row['disk_free_bytes'] >= needed_bytes else 'failed',
        f'{row["disk_free_bytes"] / 1e9:.1f} GB free for the run folder on {row["host"]}, '
        f'{needed_bytes / 1e9:.1f} GB needed',
        'free space, or change run.dir or checkpoint.keep',
    )


def _run_folder(rows: Sequence[Facts]) -> Check:
    """Check that rank 0 can write to the run folder. Warn if hosts do not see it, because --resume
    needs it."""
    name, problem = 'run folder', rows[0]['run_folder_problem']
    if problem is None:
        return Check(name, 'not needed', 'one host')
    if problem:
        return Check(
            name,
            'failed',
            f'{problem} on {rows[0]["host"]}, which writes the files of the run',
            'choose a writable run.dir',
        )
    blind = [r for r in rows if r['run_folder_problem']]
    if blind:
        return Check(
            name,
            'warning',
            f'files of {rows[0]["host"]} are not visible on {hosts_of(blind)} '
            f'({blind[0]["run_folder_problem"]})',
            'put run.dir on a shared file system; otherwise telemetry '
            'stays on each host, and --resume finds no run on these hosts',
        )
    return Check(name, 'ok', f'visible on all {len(by_node(rows))} hosts')


def _energy(rows: Sequence[Facts]) -> Check:
    nodes = [node[0] for node in by_node(rows)]
    texts = []
    for kind, name in (('cpu', 'CPU packages'), ('gpu', 'GPUs')):
        blind = [r for r in nodes if not r['energy'][kind]]
        if count := sum(r['energy'][kind] for r in nodes):
            texts.append(
                f'{count} {name} can be measured'
                + (f', none on {hosts_of(blind)}, so there is no total' if blind else '')
            )
    if not texts:
        return Check(
            'energy',
            'not needed',
            'not measured; no readable counters (powercap needs root, GPUs need NVML)',
        )
    return Check('energy', 'ok', '; '.join(texts) + ' (run.telemetry)')


def _clocks(rows: Sequence[Facts]) -> Check:
    skew, row = max((abs(r['clock_offset_s']), i) for i, r in enumerate(rows))
    return Check(
        'clocks',
        'ok' if skew <= _MAX_CLOCK_SKEW_S else 'failed',
        f'at most {1e3 * skew:.0f} ms apart ({rows[row]["host"]} and {rows[0]["host"]})',
        f'set the clock of {rows[row]["host"]}, for example with chrony',
    )


def _all_reduce(rows: Sequence[Facts]) -> Check:
    if len(rows) == 1:
        return Check('all-reduce', 'not needed', 'one rank')
    size, seconds = rows[0]['all_reduce_bytes'], max(r['all_reduce_s'] for r in rows)
    bandwidth = size / seconds
    return Check(
        'all-reduce',
        'ok',
        f'{size / 1e6:.0f} MB in {1e3 * seconds:.0f} ms: {bandwidth / 1e9:.2f} GB/s, '
        f'bus {bandwidth * 2 * (len(rows) - 1) / len(rows) / 1e9:.2f} GB/s',
    )


def check_facts(
    rows: Sequence[Facts],
    device: str = 'cpu',
    precision: str = 'float32',
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
    needed_disk_bytes: int = 0,
) -> list[Check]:
    """Compare the facts of all ranks (rank 0 first) with each other and with a configuration's
    requirements."""
    return [
        _same(
            'program',
            rows,
            lambda r: f'code {r["code"]}',
            f'code {rows[0]["code"]} on all ranks',
            'check out the same commit on {}',
        ),
        _same(
            'configuration',
            rows,
            lambda r: f'digest {r["config"]}',
            f'digest {rows[0]["config"]} on all ranks',
            'copy the configuration file to {} again',
        ),
        _same(
            'Python', rows, lambda r: r['python'], rows[0]['python'], 'run launch/setup.sh on {}'
        ),
        _packages(rows),
        _processor(rows, precision),
        _layers(rows),
        gpu_stack.check_gpus(rows, device),
        gpu_stack.check_libraries(rows, device),
        *(
            [gpu_stack.check_environment(rows), gpu_stack.check_trial(rows)]
            if device == 'gpu'
            else []
        ),
        Check('DALI', 'ok', f'{rows[0]["dali"]} imports'),
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


def render_checks(checks: Sequence[Check], is_quiet: bool) -> str:
    """Render one line per check, and a fix below each warning or failure. is_quiet omits all other
    checks."""
    lines = []
    for c in checks:
        is_passed = c.status in ('ok', 'not needed')
        lines += [] if is_quiet and is_passed else [f'{c.status:10}  {c.name:15}  {c.found}']
        lines += [] if is_passed or not c.fix else [f'{"":29}fix: {c.fix}']
    count = Counter(c.status for c in checks)
    return '\n'.join(
        [
            *lines,
            f'doctor: {plural(count["ok"], "check")} passed, {count["failed"]} failed, '
            f'{plural(count["warning"], "warning")}',
        ]
    )
