"""Invariants of the Run and the reports that any file yields."""

import math
from pathlib import Path

import pytest

from mlperf_rn50.analysis.report.report_data import report_data, runs_csv
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.analysis.sets.time_parts import Parts, parts_of
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.plain import MARKDOWN, TERMINAL, render_text
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.read.reader import read_run


def check_run(path: Path):
    """Read a file and check the invariants; return None if it is not a log."""
    try:
        run = read_run(path)
    except UserError as e:
        assert str(path) in str(e) and '\n' not in str(e)
        return None
    assert (
        len(run.evaluations) <= 10_000 and len(run.segments) <= 10_000 and len(run.findings) <= 200
    )
    assert all(0 <= e.accuracy <= 1 for e in run.evaluations)
    assert [e.epoch for e in run.evaluations] == sorted({e.epoch for e in run.evaluations})
    for value in (run.time_to_train_s, run.init_s):
        assert value is None or (math.isfinite(value) and value >= 0)
    for count in (run.num_nodes, run.num_ranks, run.global_batch_size):
        assert count is None or count >= 1
    if run.status == 'converged':
        data = path.read_bytes()
        assert b'run_start' in data or b'run_resumed' in data
        assert b'run_stop' in data and b'eval_accuracy' in data
        assert run.time_to_train_s and run.epochs_to_converge == run.evaluations[-1].epoch
        assert run.target_accuracy is None or run.evaluations[-1].accuracy >= run.target_accuracy
    else:
        assert run.epochs_to_converge is None
    parts = parts_of(run)
    assert (
        parts is None
        or isinstance(parts, Parts)
        and parts.on_clock_s == pytest.approx(run.time_to_train_s)
        and min(parts.first_s, parts.training_s, parts.evaluation_s, parts.other_s)
        >= -1e-6 * run.time_to_train_s
    )
    return run


def check_report(path: Path) -> None:
    """Check that every report can be rendered and has no control characters."""
    studies = make_studies(load_run_sets([path]))
    texts = (
        *(render_text(make_report(studies), style) for style in (TERMINAL, MARKDOWN)),
        ''.join(runs_csv(studies)),
        ''.join(render_json(report_data(studies))),
    )
    for text in texts:
        assert all(c.isprintable() or c == '\n' for c in text)
