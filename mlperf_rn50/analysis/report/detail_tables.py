"""Tables of one study beside its answer: runs, scaling, splits of time, energy, reads, reference convergence points."""
from mlperf_rn50.analysis.report.refs import (
    clock_refs,
    evaluation_refs,
    line_refs,
    minutes_text,
    time_refs,
    training_refs,
    unit_name,
)
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.convergence import System, ratio
from mlperf_rn50.analysis.sets.cost import kwh
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.run import Run
from mlperf_rn50.mllog.sidecar.energy import KINDS, NO_COUNTERS, NO_TELEMETRY
from mlperf_rn50.mllog.sidecar.metrics import NodeReads, read_node_reads
from mlperf_rn50.table import Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.text import data_name, duration, plural

_MAX_RUNS, MAX_NOTES = 500, 200  # of a study


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
                  number_cell(r.epochs_to_converge, refs=evaluation_refs(r)),
                  Cell(minutes_text(r.time_to_train_s), r.time_to_train_s, clock_refs(r)),
                  percent_cell(r.final_accuracy, '.2f', evaluation_refs(r)),
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
            times, training = time_refs(c.system, c.baseline), training_refs(c.system, c.baseline)
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
    rows = tuple((Cell(s.name), number_cell(r.units), number_cell(r.ideal, ',.1f', training_refs(study.baseline)),
                  number_cell(r.real, ',.1f', training_refs(s)),
                  percent_cell(r.efficiency, '.0f', training_refs(s, study.baseline)))
                 for s, r in zip(study.systems, study.rates) if r and not s.refusal)
    return Table('Scaling efficiency of the throughput', ('system', unit_name(study), 'ideal images/s', 'real images/s',
                                                          'efficiency'), rows if len(rows) > 1 else ())


def splits_table(study: Study) -> Table:
    """The same number of accelerators on different numbers of nodes."""
    rows = tuple((number_cell(x.units),
                  Cell(f'{x.faster.name}: {plural(x.faster.num_nodes or 0, "node")}'),
                  number_cell(x.faster.images_per_s, ',.1f', training_refs(x.faster)),
                  Cell(f'{x.slower.name}: {plural(x.slower.num_nodes or 0, "node")}'),
                  number_cell(x.slower.images_per_s, ',.1f', training_refs(x.slower)),
                  percent_cell(x.difference, '.1f', training_refs(x.faster, x.slower)),
                  percent_cell(x.time_difference, '.1f', time_refs(x.faster, x.slower)))
                 for x in study.splits)
    return Table(f'The same number of {unit_name(study)}, other nodes', (
        unit_name(study), 'faster', 'images/s', 'slower', 'images/s', 'faster by', 'time to train shorter by'), rows)


def parts_table(study: Study) -> Table:
    """Where the time goes."""
    rows = tuple((Cell(s.name),
                  number_cell(p.init_s, ',.1f', tuple(x for r in s.scored for x in line_refs(r, keys.INIT_STOP))),
                  *(number_cell(seconds, ',.1f', time_refs(s) + training_refs(s))
                    for seconds in (p.first_s, p.training_s, p.evaluation_s, p.other_s)),
                  number_cell(p.on_clock_s, ',.1f', time_refs(s)))
                 for s in study.systems if not s.refusal and (p := s.parts))
    return Table('Where the time goes, seconds a run', ('system', 'initialisation (before the clock)', 'first epoch',
                                                        'later epochs', 'evaluation', 'other', 'on the clock'), rows)


def energy_table(study: Study) -> Table:
    """Return energy and mean power of a run of each system."""
    known = [(s, e) for s in study.systems if not s.refusal and (e := s.energy) and e.joules and e.seconds]
    rows = [(Cell(s.name), number_cell(e.seconds, ',.1f', time_refs(s)), figures_cell(kwh(e.joules)),
             Cell(' and '.join(kind.upper() + 's' for kind in e.measured)),
             figures_cell((e.joules or 0.0) / e.seconds)) for s, e in known]
    return Table('Energy of a run', ('system', 'run, s', 'kWh', 'of', 'mean W'), tuple(rows),
                 'Of all nodes, on the clock of the run.')


def energy_notes(system: System) -> list[str]:
    """Why energy is not known where some of it was counted."""
    notes = []
    for kind in KINDS:
        found = [(p.name, e.reasons[kind]) for p, e in system.energies.items() if kind in e.reasons]
        odd = [f for f in found if f[1] not in (NO_TELEMETRY, NO_COUNTERS) or len(found) < len(system.energies)]
        notes += [f'{kind.upper()} energy is not measured in {len(odd)} of {len(system.runs)} runs: {name}: {why}'
                  for name, why in odd[:1]]
    return notes


def _reads_row(system: System, node: NodeReads) -> tuple[Cell, ...]:
    first, later = ((node.path, node.first_line),), ((node.path, node.last_line),)
    return (Cell(system.name), Cell(node.host), number_cell(node.first_bytes / 1e6, ',.2f', first),
            percent_cell(ratio(node.first_new_bytes, node.first_bytes), '.1f', first),
            number_cell(None if node.later_bytes is None else node.later_bytes / 1e6, ',.2f', later),
            percent_cell(ratio(node.later_new_bytes, node.later_bytes), '.1f', later))


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
