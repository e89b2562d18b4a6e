"""The report as an answer: what is measured, the tables of each study, findings, and plots."""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import mlperf_rn50
from mlperf_rn50.analysis.report.headings import report_heading, study_command, study_heading
from mlperf_rn50.analysis.report.summary import summarise
from mlperf_rn50.analysis.report.tables import (
    finding_lines,
    findings_of,
    overview_table,
    series_matrix,
    tables_of,
)
from mlperf_rn50.analysis.sets.defects import render_finding
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.answer import Answer, Sentence
from mlperf_rn50.text import plural

MAX_STUDIES = 8  # a report on more studies is brief


def make_report(
    studies: Sequence[Study], has_all_findings: bool = False, most: int = MAX_STUDIES
) -> Answer:
    """Return the report. One on more than `most` studies has no part for each study."""
    is_brief = len(studies) > most
    parts = [
        Answer(
            title=study_heading(study),
            tables=tables_of(study),
            notes=finding_lines(study, has_all_findings),
            notes_title='Findings',
        )
        for study in studies
        if not is_brief
    ]
    sentences: list[Sentence] = [tuple(sentence) for sentence in summarise(studies)]
    overview = overview_table(studies)
    if not overview:
        return replace(*parts, sentences=sentences)

    notes = []
    if is_brief:
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
    )


def make_page(
    studies: Sequence[Study],
    limit: str = '',
    title: str | None = None,
    most: int = MAX_STUDIES,
) -> Answer:
    """Return the report for a page, with plots, all findings and a table of all series.

    Args:
        limit: what limits the newest run of the only set, as the first sentence.
        title: of the page instead of the systems and the target.
        most: studies that are not folded, with all tables and plots.
    """
    matrix = series_matrix(studies)
    overview = overview_table(studies)
    parts = [_study_page(study, len(studies) > most, len(studies) == 1) for study in studies]
    page = Answer(
        title=title or report_heading(studies),
        sentences=[*([limit] if limit else []), *map(tuple, summarise(studies))],
        tables=[matrix] if matrix else [],
        figures=lambda: _plots().draw_all(studies),
    )
    if overview:
        return replace(page, parts=[Answer(tables=[overview]), *parts])
    [part] = parts
    return replace(
        page,
        tables=[*page.tables, *part.tables],
        figures=lambda: [*_plots().draw_all(studies), *part.figures()],
        parts=part.parts,
    )


def _study_page(study: Study, is_brief: bool, is_only: bool) -> Answer:
    """Return a study with its results, plots, details and findings. A brief one is folded and has
    no details."""
    first = len(study.series) + bool(study.others)  # number of tables before the plots
    tables = tables_of(study)
    found = Answer(
        notes=finding_lines(study, more='see all findings'),
        notes_title='Findings',
    )
    whole = Answer(
        title=study_heading(study),
        tables=tables[:first],
        figures=lambda: _plots().draw_study(study, is_brief, is_only),
        parts=[found],
    )
    if is_brief:
        series = f', {len(study.series)} series' if study.series else ''
        return replace(
            whole,
            summary=plural(len(study.run_sets), 'system') + series,
            sentences=[f'Log lines, curves and all tables: {study_command(study)} --out DIR'],
        )
    lines = finding_lines(study, True)
    folded = Answer(title=f'all findings, with notes ({len(lines)})', summary='', notes=lines)
    details = replace(found, tables=tables[first:], parts=[folded] if lines else [])
    return replace(whole, parts=[details])


def _plots() -> ModuleType:
    """Return the module that draws plots, whose import is slow."""
    from mlperf_rn50.analysis.report import plots

    return plots


def page_texts(studies: Sequence[Study], source: str = '', note: str | None = None) -> dict:
    """Return the texts of the page: its command, origin, note and footer."""
    run_sets = [s for study in studies for s in study.run_sets]
    is_published = all(s.is_published for s in run_sets)
    logs = 'the packaged table of published sets' if is_published else 'the logs named above'
    days = {
        time.strftime('%Y-%m-%d', time.gmtime(run.last_s))
        for run_set in run_sets
        for run in run_set.runs
        if run.last_s
    }
    known = sorted(days or {s.round for s in run_sets})
    dates = f'runs of {" to ".join(dict.fromkeys((known[0], known[-1])))}'
    return {
        'command': 'report',
        'origin': f'{source}, {dates}' if source else dates,
        'note': note,
        'footer': f'Generated by mlperf-rn50 {mlperf_rn50.__version__} from {logs}.',
    }
