"""The doctor and ranks inside a real control group, of version 1 or 2."""
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.conftest import run_metrics
from helpers import CLI, HANG_LIMIT_S, ROOT, run, skip_for
from unit.test_watch import start as start_watched

from mlperf_rn50.train.watch import PHASES

GROUPS = Path('/sys/fs/cgroup')
NAME = f'mlperf_rn50-test-{os.getpid()}'
ENTER = 'echo $$ >"$0/cgroup.procs"; exec "$@"'
OUTER_BYTES, INNER_BYTES = 2 << 30, 8 << 30  # the outer group is the tighter one


@pytest.fixture
def joined() -> Iterator[list[Path]]:
    """The innermost groups to be in: two levels of memory, and 1.5 CPUs; removed at the end."""
    is_v2 = (GROUPS / 'cgroup.controllers').exists()
    memory, cpu = (GROUPS / ('' if is_v2 else name) / NAME for name in ('memory', 'cpu'))
    made: list[Path] = []
    try:
        try:
            for group in dict.fromkeys((memory, cpu, memory / 'inner')):
                group.mkdir()
                made.append(group)
                if is_v2 and group == memory:
                    (group / 'cgroup.subtree_control').write_text('+memory +cpu')
            limit = 'memory.max' if is_v2 else 'memory.limit_in_bytes'
            (memory / limit).write_text(str(OUTER_BYTES))
            (memory / 'inner' / limit).write_text(str(INNER_BYTES))
            if is_v2:
                (cpu / 'cpu.max').write_text('150000 100000')
            else:
                (cpu / 'cpu.cfs_period_us').write_text('100000')
                (cpu / 'cpu.cfs_quota_us').write_text('150000')
        except OSError as e:
            skip_for(f'control groups cannot be made: {e}')
        yield [memory / 'inner'] if is_v2 else [memory / 'inner', cpu]
    finally:
        for group in reversed(made):
            remove(group)


def remove(group: Path) -> None:
    """Removes a control group once all in it have ended."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while (group / 'cgroup.procs').read_text():
        assert time.monotonic() < deadline, 'a process is left in the group'
        time.sleep(0.05)
    group.rmdir()


def test_the_doctor_knows_the_group_it_is_in(joined):
    environment = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'}
    enter = 'for group in "${@:1:$0}"; do echo $$ >"$group/cgroup.procs"; done; exec "${@:$0 + 1}"'
    done = run([shutil.which('bash'), '-c', enter, len(joined), *joined, ROOT / 'launch/ranks.sh', 1, *CLI, 'doctor',
                '--format', 'json'], env={**environment, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    checks = {c['name']: c for c in found['checks']}
    assert 'their control group allows 2.1 GB' in checks['memory']['found'], checks['memory']
    assert checks['memory']['status'] == 'warning'
    allowed = min(1.5, len(os.sched_getaffinity(0)))
    assert f'1 ranks may use {allowed} of the' in checks['CPUs']['found'] and checks['threads']['status'] == 'ok'
    assert found['ranks'][0]['omp_num_threads'] == '1'


class Group:
    """A control group with a memory limit."""

    def __init__(self, folder: Path):
        self.folder, self._is_v2 = folder, (GROUPS / 'cgroup.controllers').exists()

    def limit(self, num_bytes: int) -> None:
        (self.folder / ('memory.max' if self._is_v2 else 'memory.limit_in_bytes')).write_text(str(num_bytes))
        swap = self.folder / ('memory.swap.max' if self._is_v2 else 'memory.memsw.limit_in_bytes')
        if swap.exists():
            swap.write_text('0' if self._is_v2 else str(num_bytes))

    @property
    def kills(self) -> Path:
        """The file that counts whom the kernel ended for want of memory."""
        return self.folder / ('memory.events' if self._is_v2 else 'memory.oom_control')

    @property
    def used_bytes(self) -> int:
        return int((self.folder / ('memory.current' if self._is_v2 else 'memory.usage_in_bytes')).read_text())

    def inside(self, *command: object) -> list[str]:
        """The command that runs another one in the group."""
        return ['bash', '-c', ENTER, str(self.folder), *(str(c) for c in command)]


@pytest.fixture
def group() -> Iterator[Group]:
    """A group to be limited; removed at the end."""
    folder = GROUPS / ('' if (GROUPS / 'cgroup.controllers').exists() else 'memory') / f'{NAME}-oom'
    try:
        folder.mkdir()
    except OSError as e:
        skip_for(f'control groups cannot be made: {e}')
    yield Group(folder)
    remove(folder)


@pytest.mark.parametrize('phase', PHASES)
def test_a_rank_that_the_kernel_ends_is_told_the_limit_and_what_fits(group, phase):
    group.limit(200 << 20)
    # What it holds is seen now and then; what it takes at last is too much.
    body = f'position.now("{phase}"); held = b"x" * (120 << 20); time.sleep(10); more = b"x" * (120 << 20); rest()'
    process = start_watched(body, command=group.inside(), HOROVOD_SIZE='2', HOROVOD_LOCAL_RANK='0',
                            HOROVOD_LOCAL_SIZE='2')
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert process.returncode == 1
    assert re.fullmatch(rf'mlperf-rn50: rank 0 on \S+, step 42, {phase}: killed by signal 9 \(SIGKILL\): out of '
                        r'memory: the memory limit of its cgroup is 0\.2 GB, its 2 ranks used about '
                        # As of the last look at it, which on a busy machine is while it takes more.
                        r'(0\.3 GB together, 0\.[12]|0\.4 GB together, 0\.2) GB each; (1 of this size fit: start at '
                        r'most 1 on a host, or lower train\.local_batch_size|lower train\.local_batch_size, or start '
                        r'fewer ranks on a host)\n', err)


# The kernel ends others; once it has, no more is taken, or it would end the launcher before that can say so.
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


def test_a_training_in_a_group_that_fills_up_says_so(group, tiny_config, tmp_path):
    run_dir = tmp_path / 'run'
    with open(tmp_path / 'out', 'w') as out:
        job = subprocess.Popen(group.inside(ROOT / 'launch/local.sh', '--ranks-per-node', 2, '--config', tiny_config,
                                            '--run-dir', run_dir, '--no-doctor'), stdout=out, stderr=out)
    deadline = time.monotonic() + HANG_LIMIT_S
    while len(run_metrics(run_dir, 'train')) < 8:
        assert job.poll() is None and time.monotonic() < deadline, (tmp_path / 'out').read_text()
        time.sleep(0.05)
    group.limit(group.used_bytes + (64 << 20))
    neighbour = subprocess.Popen(group.inside(sys.executable, '-c', NEIGHBOUR, group.kills))
    try:
        code = job.wait(HANG_LIMIT_S)
    finally:
        neighbour.kill()
        neighbour.wait()
    output = (tmp_path / 'out').read_text()
    assert code == 1, output
    assert re.search(r'rank \d on \S+, step \d+, (training|evaluation|writing a checkpoint): killed by signal 9 '
                     r'\(SIGKILL\): out of memory: the memory limit of its cgroup is \d+\.\d GB, its 2 ranks used '
                     r'about \d+\.\d GB together', output), output
