"""What the report says, for every form of it: tables whose cells know their value and their log lines.

Pure, but for what lies beside a log.
"""
import math
from collections.abc import Sequence
from itertools import islice

from mlperf_rn50.mlperf import keys
from mlperf_rn50.mlperf.energy import KINDS, NO_COUNTERS, NO_TELEMETRY
from mlperf_rn50.mlperf.metrics import NodeReads, read_node_reads, read_stragglers
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.study import rcp
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.cost import kwh
from mlperf_rn50.study.scaling import Study
from mlperf_rn50.study.table import Cell, Ref, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.study.text import data_name, duration, money, plural

_MAX_RUNS, _MAX_NOTES = 500, 200  # of a study
_ENERGY = ('CPU kWh', 'GPU kWh', 'images/J')


def _minutes(seconds: float | None) -> str:
    return '-' if seconds is None else f'{seconds / 60:.2f}'


def _each(values: Sequence[str]) -> str:
    """Values one after another; '63 x5' where all are the same."""
    if len(values) > 2 and len(set(values)) == 1:
        return f'{values[0]} x{len(values)}'
    return ', '.join(values) or '-'


def _lines(run: Run, *names: str) -> tuple[Ref, ...]:
    return tuple((run.path, run.lines[n]) for n in names if n in run.lines)


def _source(systems_runs: Sequence[Run], field: str) -> tuple[Ref, ...]:
    """The line of the first run that a fact of the system is from."""
    refs = ((s.path or r.path, s.line) for r in systems_runs if (s := r.sources.get(field)) and s.line is not None)
    return tuple(islice(refs, 1))


def _last_evaluation(run: Run) -> tuple[Ref, ...]:
    return ((run.path, run.evaluations[-1].line),) if run.evaluations else ()


def _clock(run: Run) -> tuple[Ref, ...]:
    return _lines(run, keys.RUN_START, keys.RUN_STOP)


def _times(*systems: System | None) -> tuple[Ref, ...]:
    """Where the times of systems come from."""
    return tuple(ref for s in systems if s for r in s.scored for ref in _clock(r))


def _training(*systems: System | None) -> tuple[Ref, ...]:
    """Where the training times of systems come from."""
    return tuple(ref for s in systems if s for ref in s.training_lines)


def unit_name(study: Study) -> str:
    """What the systems are counted in."""
    return 'accelerators' if any(s.num_accelerators for s in study.systems) else 'ranks'


def heading(study: Study) -> str:
    """What a study is about."""
    target = study.baseline.target_accuracy
    goal = f'Top-1 {100 * target:.2f} %' if target is not None else 'a target that is not logged'
    return f'{study.name}: {goal} on {data_name(study.baseline.other_dataset)}'


def official_minutes(system: System) -> float | None:
    """The official score where it is another than the unscaled one."""
    official, score = rcp.official_score_minutes(system), system.score_minutes
    return official if official is not None and score is not None and not math.isclose(official, score) else None


def _system_cells(system: System, unit: str) -> dict[str, Cell]:
    """What tables of systems show of one, by column."""
    runs, done = system.runs, system.converged
    epoch_refs = tuple(ref for r in done for ref in _last_evaluation(r))
    is_score = system.score_minutes is not None
    spread = '' if is_score or system.spread_s is None else f' ± {_minutes(system.spread_s)}'
    is_count = unit == 'accelerators'
    rate, counted, running = system.images_per_s, len(system.counted), sum(r.status == 'running' for r in runs)
    still = f', {running} running' if running else ''
    return {
        'system': Cell(system.name),
        'nodes': number_cell(system.num_nodes, refs=_source(runs, 'num_nodes')),
        unit: number_cell(system.num_accelerators if is_count else system.num_units,
                      refs=_source(runs, 'num_accelerators' if is_count else 'num_ranks')),
        'batch': number_cell(system.global_batch_size, refs=_source(runs, 'global_batch_size')),
        'converged': Cell(f'{len(done)} / {counted}{still}', len(done) / max(1, counted)),
        'epochs to converge': Cell(_each([str(e) for e in system.epochs]), system.epochs_mean, epoch_refs),
        'mean epochs': number_cell(system.epochs_mean, ',.1f', epoch_refs),
        'time, min': Cell(_minutes(system.time_s) + spread, system.time_s, _times(system)),
        'which is': Cell('score' if is_score else f'mean of {len(done)}' if done else '-'),
        'official score, min': number_cell(rcp.official_score_minutes(system), ',.2f', _times(system)),
        'images/s': number_cell(rate, ',.0f' if (rate or 0) >= 1000 else ',.1f', _training(system)),
        's/epoch': number_cell(system.epoch_s, ',.2f', _training(system)),
        'accelerator': Cell(system.accelerator or '-', refs=_source(runs, 'accelerator')),
        'framework': Cell(system.framework or '-', refs=_source(runs, 'framework'))}


def _systems_table(title: str, systems: Sequence[System], rows: Sequence[dict[str, Cell]], left_out: Sequence[str],
                   **keys) -> Table:
    """A table of systems without some columns, and without those that no system has anything to say in.

    A system whose runs are no set has the reason in place of numbers.
    """
    empty = [name for name in ('accelerator', 'framework') if not any(getattr(s, name) for s in systems)]
    if not any(map(official_minutes, systems)):
        empty.append('official score, min')
    head = tuple(h for h in rows[0] if h not in {*left_out, *empty})
    return Table(title, head, tuple(
        (row['system'], Cell(f'refused: {s.refusal}', span=len(head) - 1)) if s.refusal else
        tuple(row[h] for h in head) for s, row in zip(systems, rows)), **keys)


def _is_other_accelerator(study: Study) -> bool:
    """Whether an efficiency is missing because accelerators differ."""
    base = study.baseline.accelerator
    return any(c and c.efficiency is None and c.system.accelerator and base and c.system.accelerator != base
               for c in study.comparisons)


def _cost_cells(study: Study, system: System, refs: tuple[Ref, ...]) -> dict[str, Cell]:
    """What a system's time costs, by column."""
    energy, cost = system.energy, study.cost(system)
    return {'node-hours': figures_cell(system.node_hours, refs),
            'cost': Cell('-' if cost is None else money(cost), cost, refs),
            'CPU kWh': figures_cell(kwh(energy.cpu_joules) if energy else None, refs),
            'GPU kWh': figures_cell(kwh(energy.gpu_joules) if energy else None, refs),
            'images/J': figures_cell(system.images_per_joule, refs)}


def _without_costs(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """The columns of costs in which no system has anything to say; node-hours stand beside what follows from them."""
    empty = [h for h in ('cost', *_ENERGY) if all(row[h].value is None for row in rows)]
    return [*empty, 'node-hours'] if len(empty) == 1 + len(_ENERGY) else empty


def _cost_note(study: Study, left_out: Sequence[str]) -> str:
    price = '' if 'cost' in left_out else (
        f' Node-hours and cost are of the time, at {study.price_per_node_hour:,g} a node-hour.')
    return price if all(h in left_out for h in _ENERGY) else price + (
        ' Energy is the mean of the runs of the time, from run_start to run_stop, of the CPU packages and the GPUs of '
        'all nodes and of nothing else; images/J are over what is shown of both.')


def answer_table(study: Study) -> Table:
    """Epochs to converge and time to train of each system."""
    rows = []
    for system, comparison in zip(study.systems, study.comparisons):
        refs = _times(system, study.baseline)
        cells = _system_cells(system, unit_name(study))
        names = {h: cells.pop(h) for h in ('accelerator', 'framework')}
        rows.append({**cells, 'speed-up': number_cell(comparison.speedup if comparison else None, ',.1f', refs),
                     'efficiency': percent_cell(comparison.efficiency if comparison else None, '.0f', refs),
                     **_cost_cells(study, system, _times(system)), **names})
    is_compared = any(c and c.system is not study.baseline for c in study.comparisons)
    left_out = _without_costs(rows)
    note = (f'Speed-up and efficiency against {study.baseline.name}. ' if is_compared else '') + (
        'There is no efficiency between different accelerators. ' if _is_other_accelerator(study) else '') + (
        'The time is the MLPerf score (five runs, fastest and slowest dropped), else the mean of the runs that '
        'converged ± standard deviation.') + (
        ' The official score is scaled by the reference convergence points.'
        if any(map(official_minutes, study.systems)) else '') + _cost_note(study, left_out)
    return _systems_table(
        'Epochs to converge and time to train', study.systems, rows,
        (*left_out, *(() if is_compared else ('speed-up', 'efficiency'))),
        note=note, minor=(unit_name(study), 'batch', 'epochs to converge', 'which is', 'images/s', 's/epoch',
                          'accelerator', 'framework'))


def overview_table(studies: Sequence[Study]) -> Table | None:
    """All systems of all rounds and organisations; None for a single study, which is one."""
    if len(studies) < 2:
        return None
    rows = []
    for number, study in enumerate(studies, start=1):
        for system in study.systems:
            cells = _system_cells(system, 'accelerators')
            rows.append({'system': Cell(system.name, study=number), 'round': Cell(system.round),
                         'organisation': Cell(system.org or '-', refs=_source(system.runs, 'org')),
                         **{h: cells[h] for h in ('nodes', 'accelerators', 'batch', 'converged', 'mean epochs',
                                                  'time, min', 'which is', 'official score, min', 'accelerator',
                                                  'framework')},
                         'target': percent_cell(system.target_accuracy, '.2f', _source(system.runs, 'target_accuracy')),
                         'data': Cell(data_name(system.other_dataset)), 'study': Cell(study.name)})
    return _systems_table(
        'All systems', [s for study in studies for s in study.systems], rows, (),
        note='Times to different targets or on different data are no comparison; each study below has one target.',
        minor=('organisation', 'nodes', 'accelerator', 'framework', 'batch', 'converged', 'which is',
               'official score, min', 'target', 'data', 'study'),
        choices=('round', 'organisation', 'accelerator'))


def _status(run: Run) -> str:
    """The status; of a run that goes on, how far it is."""
    if run.status != 'running':
        return run.status
    best = run.best_accuracy
    return ', '.join(['running', *([f'epoch {run.last_epoch}'] if run.last_epoch is not None else []),
                      *([f'best {100 * best:.2f} %'] if best is not None else []),
                      *([f'written {duration(run.age_s)} ago'] if run.age_s is not None else [])])


def runs_table(study: Study) -> Table:
    """Every run that was started, or so many that a page can be loaded."""
    runs = [(s, r) for s in study.systems for r in s.runs]
    first = sorted(range(len(runs)), key=lambda i: runs[i][1].status == 'converged')[:_MAX_RUNS]
    shown = [runs[i] for i in sorted(first)]
    rows = tuple((Cell(s.name), Cell(r.path.name), Cell(_status(r)),
                  number_cell(r.epochs_to_converge, refs=_last_evaluation(r)),
                  Cell(_minutes(r.time_to_train_s), r.time_to_train_s, _clock(r)),
                  percent_cell(r.final_accuracy, '.2f', _last_evaluation(r)),
                  Cell('-' if r.seed is None else str(r.seed), r.seed,
                       ((r.path, r.sources['seed'].line or 0),) if 'seed' in r.sources else ()),
                  Cell(str(len(r.warnings) or '-'), len(r.warnings)))
                 for s, r in shown)
    note = '' if len(shown) == len(runs) else (
        f'{len(shown)} of {len(runs)} runs, those that did not converge before others; all are in the JSON and the CSV '
        'of the report.')
    return Table('Runs', ('system', 'log', 'status', 'epochs', 'time, min',
                          f'last Top-1, {data_name(study.baseline.other_dataset)}', 'seed', 'warnings'), rows, note,
                 minor=('seed', 'warnings'))


def scaling_table(study: Study) -> Table:
    """The speed-up and its causes."""
    rows = []
    for c in study.comparisons:
        if c and c.system is not study.baseline:
            times, training = _times(c.system, c.baseline), _training(c.system, c.baseline)
            rows.append((Cell(c.system.name), number_cell(c.speedup, ',.2f', times),
                         number_cell(c.throughput_gain, ',.2f', training),
                         number_cell(c.epoch_ratio, ',.3f', training),
                         number_cell(c.share_ratio, ',.3f', times + training),
                         percent_cell(c.efficiency, '.1f', times),
                         percent_cell(c.hardware_efficiency, '.1f', training)))
    return Table('Why: speed-up = throughput gain x epoch ratio x share ratio', (
        'system', 'speed-up', 'throughput gain', 'epoch ratio', 'share ratio', 'efficiency', 'hardware efficiency'),
        tuple(rows),
        f'Against {study.baseline.name}, over the runs of the time. Throughput: hardware. Epochs: statistics. Share: '
        'of the time that epochs at full speed take; the rest is the first epoch, evaluations and what lies between. '
        f'Hardware efficiency: throughput gain over the ratio of {unit_name(study)}.')


def rates_table(study: Study) -> Table:
    """Throughput against the ideal."""
    rows = tuple((Cell(s.name), number_cell(r.units), number_cell(r.ideal, ',.1f', _training(study.baseline)),
                  number_cell(r.real, ',.1f', _training(s)),
                  percent_cell(r.efficiency, '.0f', _training(s, study.baseline)))
                 for s, r in zip(study.systems, study.rates) if r and not s.refusal)
    return Table('Scaling efficiency of the throughput', ('system', unit_name(study), 'ideal images/s', 'real images/s',
                                                          'efficiency'), rows if len(rows) > 1 else ())


def splits_table(study: Study) -> Table:
    """The same number of accelerators on different numbers of nodes."""
    rows = tuple((number_cell(x.units),
                  Cell(f'{x.faster.name}: {plural(x.faster.num_nodes or 0, "node")}'),
                  number_cell(x.faster.images_per_s, ',.1f', _training(x.faster)),
                  Cell(f'{x.slower.name}: {plural(x.slower.num_nodes or 0, "node")}'),
                  number_cell(x.slower.images_per_s, ',.1f', _training(x.slower)),
                  percent_cell(x.difference, '.1f', _training(x.faster, x.slower)),
                  percent_cell(x.time_difference, '.1f', _times(x.faster, x.slower)))
                 for x in study.splits)
    return Table(f'The same number of {unit_name(study)}, other nodes', (
        unit_name(study), 'faster', 'images/s', 'slower', 'images/s', 'faster by', 'time to train shorter by'), rows)


def parts_table(study: Study) -> Table:
    """Where the time goes."""
    rows = tuple((Cell(s.name),
                  number_cell(p.init_s, ',.1f', tuple(x for r in s.scored for x in _lines(r, keys.INIT_STOP))),
                  *(number_cell(seconds, ',.1f', _times(s) + _training(s))
                    for seconds in (p.first_s, p.training_s, p.evaluation_s, p.other_s)),
                  number_cell(p.on_clock_s, ',.1f', _times(s)))
                 for s in study.systems if not s.refusal and (p := s.parts))
    return Table('Where the time goes, seconds a run', ('system', 'initialisation (before the clock)', 'first epoch',
                                                        'later epochs', 'evaluation', 'other', 'on the clock'), rows)


def energy_table(study: Study) -> Table:
    """Return energy and mean power of a run of each system."""
    known = [(s, e) for s in study.systems if not s.refusal and (e := s.energy) and e.joules and e.seconds]
    rows = [(Cell(s.name), number_cell(e.seconds, ',.1f', _times(s)), figures_cell(kwh(e.joules)),
             Cell(' and '.join(kind.upper() + 's' for kind in e.measured)),
             figures_cell((e.joules or 0.0) / e.seconds)) for s, e in known]
    return Table('Energy of a run', ('system', 'run, s', 'kWh', 'of', 'mean W'), tuple(rows),
                 'Of all nodes, on the clock of the run.')


def _energy_notes(system: System) -> list[str]:
    """Why energy is not known where some of it was counted."""
    notes = []
    for kind in KINDS:
        found = [(p.name, e.reasons[kind]) for p, e in system.energies.items() if kind in e.reasons]
        odd = [f for f in found if f[1] not in (NO_TELEMETRY, NO_COUNTERS) or len(found) < len(system.energies)]
        notes += [f'{kind.upper()} energy is not measured in {len(odd)} of {len(system.runs)} runs: {name}: {why}'
                  for name, why in odd[:1]]
    return notes


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _reads_row(system: System, node: NodeReads) -> tuple[Cell, ...]:
    first, later = ((node.path, node.first_line),), ((node.path, node.last_line),)
    return (Cell(system.name), Cell(node.host), number_cell(node.first_bytes / 1e6, ',.2f', first),
            percent_cell(_share(node.first_new_bytes, node.first_bytes), '.1f', first),
            number_cell(None if node.later_bytes is None else node.later_bytes / 1e6, ',.2f', later),
            percent_cell(_share(node.later_new_bytes, node.later_bytes), '.1f', later))


def reads_table(study: Study) -> Table:
    """Bytes that each node read of the training set, of a system's first run whose metrics have them."""
    rows = tuple(_reads_row(s, node) for s in study.systems
                 for node in next(filter(None, map(read_node_reads, s.runs)), []))
    return Table('Training records that each node read, an epoch', (
        'system', 'node', 'first epoch, MB', 'of them new', 'later epochs, MB', 'of them new'), rows,
        'Of the first run that has them; later epochs are a mean. New: not read before by this node since its run '
        'started or was resumed; the others may come from its page cache.')


def rcp_table(study: Study) -> Table:
    """Epochs against the reference convergence points."""
    verdicts = [(s, v) for s in study.systems if (v := rcp.check_rcp(s))]
    rows = tuple((Cell(s.name), number_cell(s.global_batch_size),
                  *(number_cell(epochs, ',.2f') for epochs in (v.epochs, v.reference_epochs, v.min_epochs)),
                  Cell(f'{v.ruleset}{"" if v.is_of_round else f" ({s.round} has none)"}'), Cell(v.text))
                 for s, v in verdicts)
    return Table('Epochs against the reference convergence points', (
        'system', 'global batch', 'epochs', 'reference', 'at least', 'points of', 'the official check'), rows)


def tables_of(study: Study) -> list[Table]:
    """All tables that a study has something to say in."""
    tables = [answer_table(study), scaling_table(study), splits_table(study), rates_table(study), parts_table(study),
              energy_table(study), reads_table(study), rcp_table(study), runs_table(study)]
    return [t for t in tables if t.rows]


def notes_of(study: Study) -> list[str]:
    """What weakens the numbers: of each system, then of the comparison."""
    named: dict[str, list[str]] = {}
    for system in study.systems:
        slow = (f'{run.path.name}: {text}' for run in system.runs for text in read_stragglers(run))
        said = (w for w in system.warnings if w != system.refusal)  # its row says why
        for text in (*said, *_energy_notes(system), *slow):
            named.setdefault(text, []).append(system.name)
    notes = [*(f'{", ".join(names)}: {text}' for text, names in named.items()), *study.notes]
    more = [f'{len(notes) - _MAX_NOTES} more such notes are in the JSON of the report'] * (len(notes) > _MAX_NOTES)
    return notes[:_MAX_NOTES] + more
