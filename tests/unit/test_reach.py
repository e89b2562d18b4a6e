"""What a change reaches, on this checkout's own files."""
import pytest
from reach import ROOT, is_reached


@pytest.mark.parametrize('changed, reached, spared', [
    # Imported by the test, or by what it imports.
    ('mlperf_rn50/train/schedule.py', 'unit/test_schedule.py unit/test_plan.py',
     'unit/test_reader.py unit/test_processor.py'),
    # Imported only by what the test starts as a program.
    ('mlperf_rn50/train/comm.py', 'e2e/test_train.py e2e/test_resume.py parallel/test_ranks.py cluster/test_faults.py',
     'unit/test_reader.py unit/test_schedule.py'),
    ('mlperf_rn50/study/report_page.py', 'unit/test_page.py e2e/test_page.py',
     'parallel/test_ranks.py unit/test_watch.py'),
    ('launch/engines/openmpi.sh',
     'e2e/test_containers.py cluster/test_engines.py', 'unit/test_schedule.py unit/test_reader.py'),
    ('docs/launch.md', 'docs/test_docs.py', 'unit/test_schedule.py e2e/test_train.py'),
    # Of the tests' own: a conftest.py, and what a test starts.
    ('tests/e2e/conftest.py', 'e2e/test_train.py', 'unit/test_reader.py'),
    ('tests/parallel/workers.py', 'parallel/test_ranks.py', 'unit/test_reader.py'),
    ('tests/fuzz_reader.py', 'property/test_reader.py', 'unit/test_schedule.py'),
    ('tests/install.sh', 'cluster/test_engines.py', 'unit/test_schedule.py'),
    ('tests/lines.py', 'unit/test_reader.py property/test_reader.py', 'unit/test_schedule.py'),
    ('tests/unit/test_reader.py', 'unit/test_reader.py', 'property/test_reader.py'),
    ('setup.cfg', 'unit/test_schedule.py cluster/test_slurm.py', '')])
def test_a_change_reaches(changed, reached, spared):
    for name in reached.split():
        assert is_reached(ROOT / changed, ROOT / 'tests' / name), name
    for name in spared.split():
        assert not is_reached(ROOT / changed, ROOT / 'tests' / name), name
