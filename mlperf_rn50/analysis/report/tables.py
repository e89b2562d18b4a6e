"""Tables and warnings of the report, for all output formats. The only files read are sidecar files of the logs."""
import math
from collections.abc import Sequence

from mlperf_rn50.analysis.report import detail_tables as details
from mlperf_rn50.analysis.report.refs import evaluation_refs, fact_refs, time_refs, training_refs, unit_name
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.cost import kwh
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.analysis.sets.set_warnings import set_warnings
from mlperf_rn50.mllog.sidecar.metrics import read_stragglers
from mlperf_rn50.table import Cell, Ref, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.text import data_name, minutes, money

MAX_NOTES = 200  # maximum warnings shown per study
_ENERGY = ('CPU kWh', 'GPU kWh', 'images/J')


def _listed(values: Sequence[str]) -> str:
    """Join values with commas; three or more values that are all equal become, for example, '63 x5'."""
    return f'{values[0]} x{len(values)}' if len(values) > 2 and len(set(values)) == 1 else ', '.join(values) or '-'


def official_minutes(run_set: RunSet) -> float | None:
    """Return the official score if it differs from the unscaled one."""
    official, score = rcp.official_score_minutes(run_set), run_set.score_minutes
    return official if official is not None and score is not None and not math.isclose(official, score) else None


def _system_cells(run_set: RunSet, unit: str) -> dict[str, Cell]:
    runs, done = run_set.runs, run_set.converged
    epoch_refs = tuple(ref for r in done for ref in evaluation_refs(r))
    is_score = run_set.score_minutes is not None
    spread = '' if is_score or run_set.spread_s is None else f' ± {minutes(run_set.spread_s)}'
    is_count = unit == 'accelerators'
    rate, counted, num_running = run_set.images_per_s, len(run_set.counted), sum(r.status == 'running' for r in runs)
    still = f', {num_running} running' if num_running else ''
    return {
        'system': Cell(run_set.name),
        'nodes': number_cell(run_set.num_nodes, refs=fact_refs(runs, 'num_nodes')),
        unit: number_cell(run_set.num_accelerators if is_count else run_set.num_units,
                      refs=fact_refs(runs, 'num_accelerators' if is_count else 'num_ranks')),
        'batch': number_cell(run_set.global_batch_size, refs=fact_refs(runs, 'global_batch_size')),
        'converged': Cell(f'{len(done)} / {counted}{still}', len(done) / max(1, counted)),
        'epochs to converge': Cell(_listed([str(e) for e in run_set.epochs]), run_set.epochs_mean, epoch_refs),
        'mean epochs': number_cell(run_set.epochs_mean, ',.1f', epoch_refs),
        'time, min': Cell(minutes(run_set.time_s) + spread, run_set.time_s, time_refs(run_set)),
        'time from': Cell('score' if is_score else f'mean of {len(done)}' if done else '-'),
        'official score, min': number_cell(rcp.official_score_minutes(run_set), ',.2f', time_refs(run_set)),
        'images/s': number_cell(rate, ',.0f' if (rate or 0) >= 1000 else ',.1f', training_refs(run_set)),
        's/epoch': number_cell(run_set.epoch_s, ',.2f', training_refs(run_set)),
        'accelerator': Cell(run_set.accelerator or '-', refs=fact_refs(runs, 'accelerator')),
        'framework': Cell(run_set.framework or '-', refs=fact_refs(runs, 'framework'))}


def _systems_table(title: str, run_sets: Sequence[RunSet], rows: Sequence[dict[str, Cell]], left_out: Sequence[str],
                   **keys) -> Table:
    """Return a table of systems without empty columns; a refused system's row has the reason instead of numbers."""
    empty = [name for name in ('accelerator', 'framework') if not any(getattr(s, name) for s in run_sets)]
    if not any(map(official_minutes, run_sets)):
        empty.append('official score, min')
    head = tuple(h for h in rows[0] if h not in {*left_out, *empty})
    return Table(title, head, tuple(
        (row['system'], Cell(f'refused: {s.refusal}', span=len(head) - 1)) if s.refusal else
        tuple(row[h] for h in head) for s, row in zip(run_sets, rows)), **keys)


def _cost_cells(study: Study, run_set: RunSet, refs: tuple[Ref, ...]) -> dict[str, Cell]:
    energy, cost = run_set.energy, study.cost(run_set)
    return {'node-hours': figures_cell(run_set.node_hours, refs),
            'cost': Cell('-' if cost is None else money(cost), cost, refs),
            'CPU kWh': figures_cell(kwh(energy.cpu_joules) if energy else None, refs),
            'GPU kWh': figures_cell(kwh(energy.gpu_joules) if energy else None, refs),
            'images/J': figures_cell(run_set.images_per_joule, refs)}


def _cost_note(study: Study, left_out: Sequence[str]) -> str:
    price = '' if 'cost' in left_out else (
        f' Node-hours and cost are based on the time shown, at {study.price_per_node_hour:,g} per node-hour.')
    return price if all(h in left_out for h in _ENERGY) else price + (
        ' Energy is the mean over the scored runs from run_start to run_stop and covers only the CPU packages and GPUs '
        'of all nodes; images/J uses the sum of the energies shown.')


def answer_table(study: Study) -> Table:
    rows = []
    for run_set, comparison in zip(study.run_sets, study.comparisons):
        refs = time_refs(run_set, study.baseline)
        cells = _system_cells(run_set, unit_name(study))
        names = {h: cells.pop(h) for h in ('accelerator', 'framework')}
        rows.append({**cells, 'speed-up': number_cell(comparison.speedup if comparison else None, ',.1f', refs),
                     'efficiency': percent_cell(comparison.efficiency if comparison else None, '.0f', refs),
                     **_cost_cells(study, run_set, time_refs(run_set)), **names})
    is_compared = any(c and c.run_set is not study.baseline for c in study.comparisons)
    left_out = [h for h in ('cost', *_ENERGY) if all(row[h].value is None for row in rows)]
    left_out += ['node-hours'] if len(left_out) == 1 + len(_ENERGY) else []
    base = study.baseline.accelerator
    differs = any(c and c.efficiency is None and c.run_set.accelerator and base and c.run_set.accelerator != base
                  for c in study.comparisons)
    note = (f'Speed-up and efficiency are relative to {study.baseline.name}. ' if is_compared else '') + (
        'Efficiency between different accelerators is not defined. ' if differs else '') + (
        'The time is the MLPerf score (five runs, fastest and slowest dropped) or, without a score, the mean of the '
        'converged runs ± standard deviation.') + (
        ' The official score is scaled by the reference convergence points.'
        if any(map(official_minutes, study.run_sets)) else '') + _cost_note(study, left_out)
    return _systems_table(
        'Epochs to converge and time to train', study.run_sets, rows,
        (*left_out, *(() if is_compared else ('speed-up', 'efficiency'))),
        note=note, minor=(unit_name(study), 'batch', 'epochs to converge', 'time from', 'images/s', 's/epoch',
                          'accelerator', 'framework'))


def overview_table(studies: Sequence[Study]) -> Table | None:
    """Return the table of all systems; None for a single study."""
    if len(studies) < 2:
        return None
    rows = []
    for number, study in enumerate(studies, start=1):
        for run_set in study.run_sets:
            cells = _system_cells(run_set, 'accelerators')
            rows.append({'system': Cell(run_set.name, study=number), 'round': Cell(', '.join(run_set.rounds)),
                         'organisation': Cell(run_set.org or '-', refs=fact_refs(run_set.runs, 'org')),
                         **{h: cells[h] for h in ('nodes', 'accelerators', 'batch', 'converged', 'mean epochs',
                                                  'time, min', 'time from', 'official score, min', 'accelerator',
                                                  'framework')},
                         'target': percent_cell(run_set.target_accuracy, '.2f',
                                                fact_refs(run_set.runs, 'target_accuracy')),
                         'data': Cell(data_name(run_set.other_dataset)), 'study': Cell(study.name)})
    return _systems_table(
        'All systems', [s for study in studies for s in study.run_sets], rows, (),
        note='Times to different targets or on different data are not comparable; each study below has one target.',
        minor=('organisation', 'nodes', 'accelerator', 'framework', 'batch', 'converged', 'time from',
               'official score, min', 'target', 'data', 'study'),
        choices=('round', 'organisation', 'accelerator'))


def tables_of(study: Study) -> list[Table]:
    """Return the non-empty tables of a study."""
    makers = (answer_table, details.scaling_table, details.splits_table, details.rates_table, details.parts_table,
              details.energy_table, details.reads_table, details.rcp_table, details.runs_table)
    return [t for make in makers if (t := make(study)).rows]


def notes_of(study: Study) -> list[str]:
    """Return the warnings about systems, then the warnings about the comparison."""
    named: dict[str, list[str]] = {}
    for run_set in study.run_sets:
        stragglers = (f'{run.path.name}: {text}' for run in run_set.runs for text in read_stragglers(run))
        warnings = (w for w in set_warnings(run_set) if w != run_set.refusal)  # the table contains the refusal
        for text in (*warnings, *details.energy_notes(run_set), *stragglers):
            named.setdefault(text, []).append(run_set.name)
    notes = [*(f'{", ".join(names)}: {text}' for text, names in named.items()), *study.notes]
    more = [f'{len(notes) - MAX_NOTES} more warnings are in the JSON report'] * (len(notes) > MAX_NOTES)
    return notes[:MAX_NOTES] + more
