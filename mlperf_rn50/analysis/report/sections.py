"""The report as an answer: what is measured, the tables of each study, and findings."""

from collections.abc import Sequence
from dataclasses import replace

from mlperf_rn50.analysis.report.data import report_data
from mlperf_rn50.analysis.report.refs import report_heading, study_command, study_heading
from mlperf_rn50.analysis.report.summary import summarise
from mlperf_rn50.analysis.report.tables import (
    finding_lines,
    findings_of,
    is_large,
    overview_table,
    tables_of,
)
from mlperf_rn50.analysis.sets.findings import render_finding
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.answer import Answer, Sentence
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK
from mlperf_rn50.text import plural


def make_report(studies: Sequence[Study], has_all_findings: bool = False) -> Answer:
    """Return the report. One on many studies (is_large) has no part for each study."""
    parts = [_study_answer(study, has_all_findings) for study in studies if not is_large(studies)]
    sentences: list[Sentence] = [tuple(sentence) for sentence in summarise(studies)]
    is_refused = any(s.reasons for study in studies for s in study.run_sets)
    exit_code = EXIT_FAILED if is_refused else EXIT_OK
    data = report_data(studies)
    overview = overview_table(studies)
    if not overview:
        return replace(*parts, sentences=sentences, data=data, exit_code=exit_code)

    notes = []
    if is_large(studies):
        found = [(s, f) for x in studies for s in x.run_sets for f in findings_of(x, s)]
        counts = [
            plural(sum(f.grade == grade for _, f in found), grade)
            for grade in ('error', 'warning', 'note')
        ]
        largest = max(studies, key=lambda study: len(study.run_sets))
        sentences += [
            f'{", ".join(counts)}: --findings',
            f'all tables: a report on fewer folders, such as {study_command(largest)}',
        ]
        if has_all_findings:
            notes = [f'{s.study_name}/{s.name}: {render_finding(f)}' for s, f in found]
    return Answer(
        title=report_heading(studies),
        sentences=sentences,
        tables=[overview],
        notes=notes,
        notes_title='Findings',
        parts=parts,
        data=data,
        exit_code=exit_code,
    )


def _study_answer(study: Study, has_all_findings: bool) -> Answer:
    return Answer(
        title=study_heading(study),
        tables=tables_of(study),
        notes=finding_lines(study, has_all_findings),
        notes_title='Findings',
    )
