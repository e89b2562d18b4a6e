"""The doctor inside a real control group, of version 1 or 2."""
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import CLI, ROOT, run, skip_for

GROUPS = Path('/sys/fs/cgroup')
NAME = f'mlperf_rn50-test-{os.getpid()}'
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
    assert '1 ranks may use 1.5 of the' in checks['CPUs']['found'] and checks['threads']['status'] == 'ok'
    assert found['ranks'][0]['omp_num_threads'] == '1'
