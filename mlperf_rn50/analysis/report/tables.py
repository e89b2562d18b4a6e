"""Tables and findings of the report, for all output formats. The only files read are sidecar files
of the logs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mlperf_rn50.analysis.report import detail_tables as details
from mlperf_rn50.analysis.report.headings import (
    has_other_epochs,
    labels_of,
    mean_text,
    mixes_divisions,
    unit_name,
)
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.defects import render_finding, set_findings
from mlperf_rn50.analysis.sets.run_set import (
    RunSet,
    evaluation_refs,
    fact_refs,
    generation_of,
    kwh,
    time_refs,
    training_refs,
)
from mlperf_rn50.analysis.sets.scaling import MAX_NAMES, Series, Study, has_other_units
from mlperf_rn50.answer import Cell, Refs, Table, columns, figures_cell, number_cell, percent_cell
from mlperf_rn50.mllog.findings import Finding, most_severe
from mlperf_rn50.mllog.sidecar.metrics import read_stragglers
from mlperf_rn50.text import data_name, minutes, money, percent, some

MAX_SHOWN = 3  # maximum errors and warnings shown per system, unless all findings are requested
MAX_FINDINGS = 200  # maximum findings shown per study
_FACTORS = columns('speed-up | efficiency | hardware | statistics | rest')
_ENERGY = ('CPU kWh', 'GPU kWh', 'images/J')
# shown if not empty
_OPTIONAL = (*_FACTORS, 'relative to', 'cost', 'node-hours', *_ENERGY, 'accelerator', 'framework')


def _epochs_text(values: Sequence[str]) -> str:
    """Join values with commas. Three or more equal values become, for example, '63 x5'."""
    if len(values) > 2 and len(set(values)) == 1:
        return f'{values[0]} x{len(values)}'
    return ', '.join(values) or '-'


def official_minutes(run_set: RunSet) -> float | None:
    """Return the score scaled by reference convergence, or None if it does not differ from the
    unscaled one."""
    official, score = rcp.official_score_minutes(run_set), run_set.score_minutes
    if official is None or score is None or math.isclose(official, score):
        return None
    return official


def _system_cells(run_set: RunSet, unit: str) -> dict[str, Cell]:
    runs, done = run_set.runs, run_set.converged
    epoch_refs = tuple(ref for r in done for ref in evaluation_refs(r))
    is_score = run_set.score_minutes is not None
    spread = '' if is_score or run_set.spread_s is None else f' ± {minutes(run_set.spread_s)}'
    basis = '-'
    if run_set.scored:
        basis = 'score' if is_score else mean_text(run_set)
    is_count = unit == 'accelerators'
    rate, counted = run_set.images_per_s, len(run_set.counted)
    num_running = sum(r.status == 'running' for r in runs)
    still = f', {num_running} running' if num_running else ''
    return {
        'system': Cell(run_set.name),
        'division': Cell(run_set.division or '-'),
        'nodes': number_cell(run_set.num_nodes, refs=fact_refs(runs, 'num_nodes')),
        unit: number_cell(
            run_set.num_accelerators if is_count else run_set.num_units,
            refs=fact_refs(runs, 'num_accelerators' if is_count else 'num_ranks'),
        ),
        'batch': number_cell(run_set.global_batch_size, refs=fact_refs(runs, 'global_batch_size')),
        'converged': Cell(f'{len(done)} / {counted}{still}', len(done) / max(1, counted)),
        'epochs to converge': Cell(
            _epochs_text([str(e) for e in run_set.epochs]), run_set.epochs_mean, epoch_refs
        ),
        'mean epochs': number_cell(run_set.epochs_mean, ',.1f', epoch_refs),
        'time, min': Cell(minutes(run_set.time_s) + spread, run_set.time_s, time_refs(run_set)),
        'cost': Cell('-'),  # for the order of the columns; _cost_cells has the value
        'time from': Cell(basis),
        'scaled score, min': number_cell(
            rcp.official_score_minutes(run_set), ',.2f', time_refs(run_set)
        ),
        'images/s': number_cell(
            rate, ',.0f' if (rate or 0) >= 1000 else ',.1f', training_refs(run_set)
        ),
        's/epoch': number_cell(run_set.epoch_s, ',.2f', training_refs(run_set)),
        'accelerator': Cell(run_set.accelerator or '-', refs=fact_refs(runs, 'accelerator')),
        'framework': Cell(run_set.framework or '-', refs=fact_refs(runs, 'framework')),
    }


def _systems_table(
    title: str,
    run_sets: Sequence[RunSet],
    rows: Sequence[dict[str, Cell]],
    order: Iterable[str],
    left_out: Sequence[str],
    **keys,
) -> Table:
    """Return the columns of `order`, without empty and left-out ones. A refused system has the
    reason instead."""
    empty = [h for h in _OPTIONAL if all(row[h].text == '-' for row in rows)]
    unscaled = () if any(map(official_minutes, run_sets)) else ('scaled score, min',)
    uniform = () if mixes_divisions(run_sets) else ('division',)
    head = [h for h in order if h not in {*left_out, *empty, *unscaled, *uniform}]
    shown = [
        (row['system'], Cell(f'refused: {run_set.refusal}', span=len(head) - 1))
        if run_set.refusal
        else tuple(row[h] for h in head)
        for run_set, row in zip(run_sets, rows)
    ]
    return Table(title, head, shown, **keys)


def _cost_cells(study: Study, run_set: RunSet, refs: Refs) -> dict[str, Cell]:
    energy, cost = run_set.energy, study.cost(run_set)
    # else node-hours would not be explained
    is_spent = cost is not None or energy and energy.measured
    return {
        'node-hours': figures_cell(run_set.node_hours if is_spent else None, refs),
        'cost': Cell('-' if cost is None else money(cost), cost, refs),
        'CPU kWh': figures_cell(kwh(energy.cpu_joules) if energy else None, refs),
        'GPU kWh': figures_cell(kwh(energy.gpu_joules) if energy else None, refs),
        'images/J': figures_cell(run_set.images_per_joule, refs),
    }


def _row(study: Study, run_set: RunSet) -> dict[str, Cell]:
    """Return all cells of a system in a study. Hardware, statistics and rest are the factors of the
    efficiency."""
    c = study.comparison_of.get(run_set)
    base = c.baseline if c else None
    times, training = time_refs(run_set, base), training_refs(run_set, base)
    cells = _system_cells(run_set, unit_name(study))
    return {
        **cells,
        'epochs': cells['mean epochs'],
        'minutes': cells['time, min'],
        'speed-up': number_cell(c.speedup if c else None, ',.2f', times),
        'efficiency': percent_cell(c.efficiency if c else None, '.1f', times),
        'relative to': Cell(base.name if base else '-'),
        'hardware': percent_cell(c.hardware_efficiency if c else None, '.1f', training),
        'statistics': percent_cell(c.epoch_ratio if c else None, '.1f', training),
        'rest': percent_cell(c.rest if c else None, '.1f', times + training),
        **_cost_cells(study, run_set, time_refs(run_set)),
    }


def _bases(study: Study, run_sets: Sequence[RunSet]) -> dict[RunSet, RunSet]:
    """Return the baseline of each system that is compared with another one."""
    return {
        s: c.baseline for s in run_sets if (c := study.comparison_of.get(s)) and c.baseline is not s
    }


def _note(study: Study, run_sets: Sequence[RunSet], head: Sequence[str]) -> str:
    bases = _bases(study, run_sets)
    names = list(dict.fromkeys(b.name for b in bases.values()))
    notes = [
        (
            bool(bases),
            f'Speed-up and efficiency are relative to {some(names, MAX_NAMES)}. Efficiency = '
            'hardware '
            '(images/s) x statistics (epochs) x rest (first epoch, evaluations, gaps).',
        ),
        (
            any((c.rest or 0.0) >= 1.0005 for s in bases if (c := study.comparison_of[s])),
            'A rest above 100 % takes a smaller share of the time than on the baseline.',
        ),
        (
            'statistics' in head and has_other_epochs(*run_sets),
            'Statistics compares the epochs of the scored runs.',
        ),
        (
            any(has_other_units(s, b) for s, b in bases.items()),
            'Efficiency between different accelerators is not defined.',
        ),
        (
            any(s.has_changed_nodes for s in (*bases, *bases.values())),
            'Efficiency of a run whose number of nodes changed is not defined.',
        ),
        ('time from' not in head, 'The time is the MLPerf score.'),
        (
            'time from' in head,
            'The time is the MLPerf score (five runs, fastest and slowest dropped) or, without '
            'a score, the mean of the converged runs ± standard deviation.',
        ),
        (
            'scaled score, min' in head,
            'The scaled score is scaled by reference convergence, as by result_summarizer.',
        ),
        (
            'cost' in head,
            'Node-hours and cost are based on the time shown, at '
            f'{study.price_per_node_hour or 0:,g} per node-hour.',
        ),
        (
            not {*_ENERGY}.isdisjoint(head),
            'Energy is the mean over the scored runs from run_start to run_stop and '
            'covers only the CPU packages and GPUs of all nodes; images/J uses the sum of the '
            'energies shown.',
        ),
    ]
    return ' '.join(text for is_shown, text in notes if is_shown)


def _study_table(
    study: Study,
    title: str,
    run_sets: Sequence[RunSet],
    order: Iterable[str],
    minor: Sequence[str],
    left_out: Sequence[str],
) -> Table:
    """Return a table of systems of a study, with a note."""
    rows = [_row(study, s) for s in run_sets]
    left_out = left_out if _bases(study, run_sets) else [*left_out, *_FACTORS]
    table = _systems_table(title, run_sets, rows, order=order, left_out=left_out, minor=minor)
    return replace(table, note=_note(study, run_sets, table.head))


def series_table(study: Study, series: Series) -> Table:
    """Return the table of a series: results with the factors of the efficiency, then other
    columns."""
    order = (
        'nodes',
        'batch',
        'epochs',
        'minutes',
        'cost',
        *_FACTORS,
        'images/s',
        'converged',
        'time from',
        'scaled score, min',
        'node-hours',
        *_ENERGY,
        'system',
    )
    left_out = []
    if all(s.score_minutes is not None for s in series.run_sets):
        left_out.append('time from')
    if all(len(s.converged) == len(s.runs) for s in series.run_sets):
        left_out.append('converged')
    title = series.title
    if labels_of(study.run_sets)[series.baseline] != series.baseline.name:
        title += ', open division'
    table = _study_table(
        study,
        title,
        series.run_sets,
        order=order,
        minor=('batch', *order[7:]),
        left_out=left_out,
    )
    return replace(table, is_whole=True)


def answer_table(study: Study) -> Table:
    """Return the table of the systems that are in no series."""
    return _study_table(
        study,
        'Other systems' if study.series else 'Epochs to converge and time to train',
        study.others,
        order=_row(study, study.baseline) if study.others else (),
        minor=(
            'division',
            'batch',
            'epochs to converge',
            'time from',
            's/epoch',
            *_FACTORS[2:],
            'accelerator',
            'framework',
            'node-hours',
            *_ENERGY,
        ),
        left_out=('epochs', 'minutes', 'relative to'),
    )


def series_matrix(studies: Sequence[Study]) -> Table | None:
    """Return the times and efficiencies of each series by number of nodes, or None for fewer than
    two series."""
    series = [(k, study, x) for k, study in enumerate(studies, start=1) for x in study.series]
    if len(series) < 2:
        return None
    nodes = sorted({s.num_nodes or 0 for _, _, x in series for s in x.run_sets})
    labels = labels_of([x.baseline for _, _, x in series])
    rows = []
    for number, study, x in series:
        # the fastest one of those on the same number of nodes
        cells = {s.num_nodes: _matrix_cell(study, s) for s in reversed(x.run_sets)}
        name = Cell(labels[x.baseline])
        if len(studies) > 1:
            name = Cell(f'{study.name}/{name.text}', study=number)
        rows.append((name, *(cells.get(n, Cell('-')) for n in nodes)))
    return Table(
        'Series: minutes by number of nodes',
        ('series', *(f'{n:,}' for n in nodes)),
        rows,
        'Small numbers: efficiency relative to the first system of the series, or to --baseline.',
        is_whole=True,
    )


def _matrix_cell(study: Study, run_set: RunSet) -> Cell:
    """Return the time of a system, with its efficiency and cost below."""
    c, cost = study.comparison_of.get(run_set), study.cost(run_set)
    share, base = (c.efficiency, c.baseline) if c else (None, None)
    more = [percent(share, '.0f')] if share else []
    more += [f'cost {money(cost)}'] if cost else []
    return Cell(
        minutes(run_set.time_s),
        run_set.time_s,
        time_refs(run_set, base),
        share=share,
        more=tuple(more),
    )


def overview_table(studies: Sequence[Study]) -> Table | None:
    """Return the table of all systems, or None for a single study."""
    shown = [
        (number, study, s) for number, study in enumerate(studies, start=1) for s in study.run_sets
    ]
    if len(studies) < 2:
        return None
    rows = [
        {
            **_row(study, s),
            **_system_cells(s, 'accelerators'),
            **_cost_cells(study, s, ()),
            'system': Cell(s.name, study=number),
            'round': Cell(', '.join(s.rounds)),
            'organisation': Cell(s.org or '-', refs=fact_refs(s.runs, 'org')),
            'target': percent_cell(s.target_accuracy, '.2f', fact_refs(s.runs, 'target_accuracy')),
            'data': Cell(data_name(s.other_dataset)),
            'generation': Cell(generation_of(s.accelerator) or '-'),
            'study': Cell(study.name),
        }
        for number, study, s in shown
    ]
    return _systems_table(
        'All systems',
        [s for _, _, s in shown],
        rows,
        order=columns(
            'system | nodes | accelerators | time, min | mean epochs | cost | efficiency | '
            'generation | round | division | organisation | batch | relative to | converged | '
            'time from | scaled score, min | accelerator | framework | target | data | study'
        ),
        left_out=(),
        note='Times to different targets or on different data are not comparable.',
        minor=columns(
            'relative to | accelerator | framework | converged | time from | scaled score, min | '
            'target | data | study'
        ),
        choices=columns(
            'nodes | generation | round | division | organisation | batch | accelerator'
        ),
    )


def tables_of(study: Study) -> list[Table]:
    """Return the non-empty tables of a study, series first."""
    makers = (
        answer_table,
        details.splits_table,
        details.parts_table,
        details.energy_table,
        details.reads_table,
        details.rcp_table,
        details.runs_table,
        details.resumes_table,
        details.goodput_table,
    )
    return [
        *(series_table(study, x) for x in study.series),
        *(t for make in makers if (t := make(study)).rows),
    ]


def findings_of(study: Study, run_set: RunSet) -> list[Finding]:
    """Return the findings about a system, its logs, its metrics and its comparison, the most severe
    first."""
    slow = [f for run in run_set.runs for f in read_stragglers(run)]
    return most_severe(
        [*set_findings(run_set), *study.findings[run_set], *slow, *details.energy_notes(run_set)]
    )


def finding_lines(study: Study, has_all: bool = False, more: str = '--findings') -> list[str]:
    """Return a line per finding, with the systems that share it.

    Args:
        has_all: whether to include notes, and more than MAX_SHOWN errors and warnings per system.
        more: where a reader finds the omitted errors and warnings.
    """
    named: dict[str, list[str]] = {}
    for run_set in study.run_sets:
        # the table contains the refusal
        found = [f for f in findings_of(study, run_set) if f.kind != 'refused']
        texts = [render_finding(f) for f in found if has_all or f.grade != 'note']
        if not has_all and len(texts) > MAX_SHOWN:
            texts[MAX_SHOWN:] = [f'{len(texts) - MAX_SHOWN} more: {more}']
        for text in texts:
            named.setdefault(text, []).append(run_set.name)
    lines = [f'{", ".join(names)}: {text}' for text, names in named.items()]
    if len(lines) > MAX_FINDINGS:
        lines[MAX_FINDINGS:] = [f'{len(lines) - MAX_FINDINGS} more findings are in the JSON report']
    return lines
