"""Records: lines of earlier and later versions, and equal keys for the writer and the readers."""

import json

import pytest
from helpers import json_table, shipped_logs

from mlperf_rn50.runfolder import jsonl, records
from mlperf_rn50.runfolder.jsonl import decode, encode
from mlperf_rn50.runfolder.records import MetricsRecord, TelemetryRecord

LOGS = sorted(shipped_logs().rglob('*.jsonl'))
RANK = '"rank": 0, "host": "h", "num_steps": 1, "data_s": 0, "compute_s": 1, "wait_s": 0'


# Lines of earlier versions, without keys added since, and lines of a later version.
@pytest.mark.parametrize(
    'kind, line',
    json_table("""
"MetricsRecord" | {"event": "train", "step": 8}
"MetricsRecord" | {"event": "epoch", "epoch": 1, "record_bytes": {"n1": 5}}
"MetricsRecord" | {"event": "resumed", "step": 40}
"MetricsRecord" | {"event": "reference", "text": "none"}
"MetricsRecord" | {"event": "course", "epoch": 3, "behind": true}
"MetricsRecord" | {"event": "end", "status": "interrupted"}
"MetricsRecord" | {"event": "end", "status": "failed", "epochs_to_converge": null}
"Attempt" | {"run": 0, "exit_code": 137, "end": null, "gained": true, "can_resume": true}
"Failure" | {"job": "1-a", "host": "h2", "cause": "killed"}
"TelemetryRecord" | {"time_ms": 5, "event": "start", "host": "a", "cpu_cores": 2, "memory_bytes": 9}
"TelemetryRecord" | {"time_ms": 5000, "cpu_percent": 98.5, "gpus": [{"power_w": 50.0}, {}]}
"""),
)
def test_lines_of_other_versions_are_read(kind, line):
    found = decode(json.dumps(line), getattr(records, kind))
    assert _keeps(json.loads(encode(found)), line)


def test_unknown_keys_and_events_are_ignored_and_new_keys_have_defaults():
    later = '{"event": "eval", "epoch": 2, "num_top1": 3, "num_images": 4, "ece": 0.1}'
    expected = records.EvalRecord(epoch=2, num_top1=3, num_images=4)
    assert decode(later, MetricsRecord) == expected
    assert decode('{"event": "of a later version"}', MetricsRecord) is None
    found = decode(f'{{"event": "ranks", "epoch": 1, "ranks": [{{{RANK}}}]}}', MetricsRecord)
    assert found.ranks[0].others_s is None and found.ranks[0].num_sharing == 1


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
