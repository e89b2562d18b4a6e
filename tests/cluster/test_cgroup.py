"""Doctor and ranks in a control group of version 1 or 2."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.conftest import run_metrics
from helpers import CLI, HANG_LIMIT_S, ROOT, argv, run, skip_for, under_ranks, variables, wait_for
from unit.test_watchdog import start as start_watched

GROUPS = Path('/sys/fs/cgroup')
IS_V2 = (GROUPS / 'cgroup.controllers').exists()
NAME = f'mlperf_rn50-test-{os.getpid()}'
MEMORY, CPU = (GROUPS / ('' if IS_V2 else name) / NAME for name in ('memory', 'cpu'))
LIMIT = 'memory.max' if IS_V2 else 'memory.limit_in_bytes'
OUTER_BYTES, INNER_BYTES = 2 << 30, 8 << 30  # the outer group is the tighter one


@pytest.fixture
def group() -> Iterator[Path]:
    """Memory group, at first without limits; removed at the end with its inner groups."""
    try:
        MEMORY.mkdir()
    except OSError as e:
        skip_for(f'control groups cannot be created: {e}')
    yield MEMORY
    for folder in (MEMORY / 'inner', CPU, MEMORY):
        if folder.exists():
            wait_for(
                lambda folder=folder: not (folder / 'cgroup.procs').read_text(),
                lambda: True,
                lambda: 'a process remains in the group',
            )
            folder.rmdir()


@pytest.fixture
def joined(group) -> list[Path]:
    """Groups to join: two levels of memory, and 1.5 CPUs."""
    if IS_V2:
        (group / 'cgroup.subtree_control').write_text('+memory +cpu')
    else:
        CPU.mkdir()
    (group / 'inner').mkdir()
    for folder, num_bytes in ((group, OUTER_BYTES), (group / 'inner', INNER_BYTES)):
        (folder / LIMIT).write_text(str(num_bytes))
    if IS_V2:
        (CPU / 'cpu.max').write_text('150000 100000')
    else:
        (CPU / 'cpu.cfs_period_us').write_text('100000')
        (CPU / 'cpu.cfs_quota_us').write_text('150000')
    return [group / 'inner'] if IS_V2 else [group / 'inner', CPU]


def test_doctor_reports_limits_of_the_group(joined):
    environment = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'}
    enter = 'for group in "${@:1:$0}"; do echo $$ >"$group/cgroup.procs"; done; exec "${@:$0 + 1}"'
    doctor = under_ranks(1, [*CLI, *'doctor --format json'.split()])
    done = run(
        ['bash', '-c', enter, len(joined), *joined, *doctor],
        env={**environment, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    checks = {c['name']: c for c in report['checks']}
    assert 'their control group allows 2.1 GB' in checks['memory']['found'], checks['memory']
    assert checks['memory']['status'] == 'warning'
    allowed = min(1.5, len(os.sched_getaffinity(0)))
    assert f'1 rank may use {allowed} of the' in checks['CPUs']['found']
    assert checks['threads']['status'] == 'ok'
    assert report['ranks'][0]['omp_num_threads'] == '1'


def limit(group: Path, num_bytes: int) -> None:
    """Limit the memory of a group, without swap."""
    (group / LIMIT).write_text(str(num_bytes))
    swap = group / ('memory.swap.max' if IS_V2 else 'memory.memsw.limit_in_bytes')
    if swap.exists():
        swap.write_text('0' if IS_V2 else str(num_bytes))


def inside(group: Path, *command: object) -> list[str]:
    """Wrap a command so that it runs in a group."""
    return argv('bash -c {} {}', 'echo $$ >"$0/cgroup.procs"; exec "$@"', group) + [
        *map(str, command)
    ]


@pytest.mark.parametrize('phase', ['start-up', 'training', 'evaluation'])
def test_out_of_memory_kill_is_reported_with_limit_and_advice(group, phase):
    limit(group, 200 << 20)
    # The watcher samples the first allocation; the second one exceeds the limit.
    body = (
        f'heartbeat.beat("{phase}"); held = b"x" * (120 << 20); time.sleep(4); more = b"x" * '
        '(120 << 20); rest()'
    )
    ranks = variables('HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=0 HOROVOD_LOCAL_SIZE=2')
    process = start_watched(body, command=inside(group), **ranks)
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert process.returncode == 1
    assert re.fullmatch(
        rf'mlperf-rn50: rank 0 on \S+, step 42, {phase}: killed by signal 9 \(SIGKILL\): out of '
        r'memory: the memory limit of the cgroup is 0\.2 GB, 2 ranks used about '
        # Usage at the last sample, which on a busy machine falls into the second
        # allocation.
        r'(0\.3 GB together, 0\.[12]|0\.4 GB together, 0\.2) GB each; (start at most 1 rank of '
        r'this '
        r'size on a host, or lower train\.local_batch_size|lower train\.local_batch_size, or start '
        r'fewer ranks on a host)\n',
        err,
    )


# Fills the group until the kernel kills a rank. Filling further would kill the launcher before it
# reports.
NEIGHBOUR = """import re, sys, time
open('/proc/self/oom_score_adj', 'w').write('-1000')
def num_kills():
    return int(re.search(r'^oom_kill ([0-9]+)$', open(sys.argv[1]).read(), re.M)[1])
held, before = [], num_kills()
while num_kills() == before:
    held.append(b'x' * (8 << 20))
    time.sleep(0.02)
time.sleep(100000)
"""


def test_training_in_a_full_group_reports_out_of_memory(group, tiny_config, tmp_path):
    run_dir = tmp_path / 'run'
    with open(tmp_path / 'out', 'w') as out:
        words = argv(
            '--ranks-per-node 2 --no-doctor --config {} --run-dir {}', tiny_config, run_dir
        )
        command = inside(group, ROOT / 'launch/local.sh', *words)
        job = subprocess.Popen(command, stdout=out, stderr=out)
    wait_for(
        lambda: len(run_metrics(run_dir, 'train')) >= 8,
        lambda: job.poll() is None,
        (tmp_path / 'out').read_text,
    )
    used_bytes = int((group / ('memory.current' if IS_V2 else 'memory.usage_in_bytes')).read_text())
    limit(group, used_bytes + (64 << 20))
    kills = group / ('memory.events' if IS_V2 else 'memory.oom_control')
    neighbour = subprocess.Popen(inside(group, sys.executable, '-c', NEIGHBOUR, kills))
    try:
        code = job.wait(HANG_LIMIT_S)
    finally:
        neighbour.kill()
        neighbour.wait()
    output = (tmp_path / 'out').read_text()
    assert code == 1, output
    assert re.search(
        r'rank \d on \S+, step \d+, (training|evaluation|writing a checkpoint): killed by signal 9 '
        r'\(SIGKILL\): out of memory: the memory limit of the cgroup is \d+\.\d GB, 2 ranks used '
        r'about \d+\.\d GB together',
        output,
    ), output
