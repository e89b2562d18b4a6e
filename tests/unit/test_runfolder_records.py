"""Records: lines of earlier and later versions, and equal keys for the writer and the readers."""

import json

import pytest
from helpers import shipped_logs

from mlperf_rn50.runfolder import jsonl, records
from mlperf_rn50.runfolder.jsonl import decode, encode
from mlperf_rn50.runfolder.records import Attempt, Failure, MetricsRecord, TelemetryRecord

LOGS = sorted(shipped_logs().rglob('*.jsonl'))
RANK = '"rank": 0, "host": "h", "num_steps": 1, "data_s": 0, "compute_s": 1, "wait_s": 0'
RANK_STEPS = {**json.loads(f'{{{RANK}}}'), 'others_s': None, 'num_sharing': 1}


# Lines of earlier versions, without keys added since, and lines of a later version.
@pytest.mark.parametrize(
    'line, expected',
    [
        ('"event": "train", "step": 8', records.TrainRecord(8)),
        (
            '"event": "eval", "epoch": 2, "num_top1": 3, "num_images": 4, "ece": 0.1',
            records.EvalRecord(epoch=2, num_top1=3, num_images=4),
        ),
        (
            '"event": "epoch", "epoch": 1, "record_bytes": {"n1": 5}',
            records.EpochRecord(1, {'n1': 5}),
        ),
        (
            f'"event": "ranks", "epoch": 1, "stragglers": ["slow"], "ranks": [{{{RANK}}}]',
            records.RanksRecord(1, ranks=[records.RankSteps(**RANK_STEPS)], stragglers=['slow']),
        ),
        ('"event": "resumed", "step": 40', records.ResumedRecord(40)),
        ('"event": "reference", "text": "none"', records.ReferenceRecord(text='none')),
        (
            '"event": "course", "epoch": 3, "behind": true',
            records.CourseRecord(3, behind=True),
        ),
        ('"event": "end", "status": "interrupted"', records.EndRecord('interrupted')),
        (
            '"event": "end", "status": "failed", "epochs_to_converge": null',
            records.EndRecord('failed', None),
        ),
        ('"event": "of a later version"', None),
        (
            '"run": 0, "exit_code": 137, "end": null, "gained": true, "can_resume": true',
            Attempt(0, 137, None, True, True),
        ),
        ('"job": "1-a", "host": "h2", "cause": "killed"', Failure('1-a', 'h2', 'killed')),
        (
            '"time_ms": 5000, "event": "start", "host": "h1", "cpu_cores": 2, "memory_bytes": 9',
            TelemetryRecord(5000, 'start', 'h1', 2, 9),
        ),
        (
            '"time_ms": 5000, "cpu_percent": 98.5, "gpus": [{"power_w": 50.0}, {}]',
            TelemetryRecord(
                5000,
                cpu_percent=98.5,
                gpus=[records.GpuSample(power_w=50.0), records.GpuSample()],
            ),
        ),
    ],
)
def test_lines_of_other_versions_are_read(line, expected):
    kind = MetricsRecord if '"event": ' in line and 'time_ms' not in line else type(expected)
    assert decode(f'{{{line}}}', kind) == expected


@pytest.mark.parametrize('path', LOGS, ids=lambda p: str(p.relative_to(shipped_logs())))
def test_files_of_published_runs_are_read_and_would_be_written_with_the_same_keys(path):
    kind = TelemetryRecord if path.name.startswith('telemetry') else MetricsRecord
    lines = path.read_text().splitlines()
    written = [json.loads(encode(decode(line, kind))) for line in lines]
    assert lines and all(_keeps(w, json.loads(r)) for w, r in zip(written, lines, strict=True))


def _keeps(written, earlier) -> bool:
    """Check that a line has all keys and values of an earlier one, in the same order; new keys may
    be in between."""
    if isinstance(earlier, dict):
        return [k for k in written if k in earlier] == list(earlier) and all(
            _keeps(written[k], v) for k, v in earlier.items()
        )
    if isinstance(earlier, list):
        return len(written) == len(earlier) and all(map(_keeps, written, earlier))
    return written == earlier


def test_a_file_of_lines_is_read_up_to_a_size(tmp_path, monkeypatch):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"event": "resumed", "step": 40}\n' * 5)
    monkeypatch.setattr(jsonl, 'MAX_BYTES', 100)
    assert len(list(jsonl.read_lines(path, MetricsRecord))) == 3
