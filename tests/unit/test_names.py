"""Numbers of new runs."""

import pytest
from helpers import json_table

from mlperf_rn50.runfolder.names import new_run, run_of


@pytest.mark.parametrize(
    'name, number',
    json_table("""
"weights/best.npz"                     | 1
"checkpoints/step_00000003/state.json" | 1
"env.json"                             | 1
"tensorboard/events"                   | 1
"notes.txt"                            | 0
"telemetry_4_host.jsonl"               | 5
"""),
)
def test_number_of_a_new_run_depends_on_files_that_it_would_replace(tmp_path, name, number):
    disk, run = tmp_path / 'disk', tmp_path / 'run'
    disk.mkdir()
    run.mkdir()
    for folder in ('checkpoints', 'weights'):  # on another disk, and empty
        if '/' not in name:
            (run / folder).symlink_to(disk)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).touch()
    assert new_run(run).index == number


def test_files_of_a_run_belong_only_to_its_log(tmp_path):
    logs = ('result_0.txt', 'result_3_v0.6.txt', 'copy.txt')
    names = [run_of(tmp_path / name).metrics.name for name in logs]
    assert names[:2] == ['metrics.jsonl', 'metrics_3.jsonl'] and names[2] not in names[:2]
