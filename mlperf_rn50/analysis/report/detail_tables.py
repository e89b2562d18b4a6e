"""Detail tables of a study: node splits, phases, energy, reads, reference convergence points,
runs."""

from mlperf_rn50.analysis.report.headings import unit_name
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.run_set import (
    RunSet,
    clock_refs,
    evaluation_refs,
    kwh,
    line_refs,
    ratio,
    time_refs,
    training_refs,
)
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.answer import (
    Cell,
    Table,
    columns,
    figures_cell,
    number_cell,
    percent_cell,
    status_cell,
)
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.events import RUN_RESUMED
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.goodput import PARTS, read_goodput
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.rulesets import ROUND_OF
from mlperf_rn50.mllog.sidecar.energy import KINDS, NO_COUNTERS, NO_TELEMETRY
from mlperf_rn50.mllog.sidecar.metrics import read_node_reads
from mlperf_rn50.text import data_name, duration, minutes, plural

_MAX_RUNS = 500  # maximum rows of the table of runs


def _status(run: Run) -> str:
    """Return the status and, for a run that is still running, its progress."""
    if run.status != 'running':
        return run.status
    best = run.best_accuracy
    return ', '.join(
        [
            'running',
            *([f'epoch {run.last_epoch}'] if run.last_epoch is not None else []),
            *([f'best {100 * best:.2f} %'] if best is not None else []),
            *([f'written {duration(run.age_s)} ago'] if run.age_s is not None else []),
        ]
    )


def runs_table(study: Study, most: int = _MAX_RUNS) -> Table:
    """Return the table of at most `most` runs. Converged runs are omitted first."""
    runs = [(s, r) for s in study.run_sets for r in s.runs]
    first = sorted(range(len(runs)), key=lambda i: runs[i][1].status == 'converged')[:most]
    shown = [runs[i] for i in sorted(first)]
    rows = [
        (
            Cell(s.name),
            Cell(r.path.name),
            status_cell(_status(r)),
            number_cell(r.epochs_to_converge, refs=evaluation_refs(r)),
            Cell(minutes(r.time_to_train_s), r.time_to_train_s, clock_refs(r)),
            percent_cell(r.final_accuracy, '.2f', evaluation_refs(r)),
            Cell(
                '-' if r.seed is None else str(r.seed),
                r.seed,
                ((r.path, r.sources['seed'].line or 0),) if 'seed' in r.sources else (),
            ),
            Cell(str(r.num_warnings or '-'), r.num_warnings),
        )
        for s, r in shown
    ]
    note = ''
    if len(shown) < len(runs):
        note = (
            f'{len(shown)} of {len(runs)} runs; converged runs are omitted first, and the JSON '
            'and CSV reports have all.'
        )
    return Table(
        'Runs',
        (
            'system',
            'log',
            'status',
            'epochs',
            'time, min',
            f'last Top-1, {data_name(study.baseline.other_dataset)}',
            'seed',
            'warnings',
        ),
        rows,
        note,
        minor=('seed', 'warnings'),
    )


def resumes_table(study: Study) -> Table:
    """Return the table of what became of the time of resumed runs."""
    rows = [
        (
            Cell(s.name),
            Cell(r.path.name),
            number_cell(r.num_resumes),
            number_cell(r.time_to_train_s, ',.1f', clock_refs(r)),
            *(number_cell(seconds, ',.1f', line_refs(r, RUN_RESUMED)) for seconds in parts),
        )
        for s in study.run_sets
        for r in s.runs
        if (parts := r.elapsed)
    ][:_MAX_RUNS]
    return Table(
        'Resumed runs, seconds from run_start to run_stop',
        columns(
            'system | log | resumes | time to train | training preserved | training lost | '
            'paused by the user | between a fault and the resume'
        ),
        rows,
        'The parts add up to the time to train, or to the time so far. A resumed run has no '
        'MLPerf score.',
    )


def goodput_table(study: Study) -> Table:
    """Return the table of the elapsed time of runs that recorded its parts."""
    runs = [(s, r) for s in study.run_sets if not s.is_published for r in s.runs][:_MAX_RUNS]
    rows = [
        (
            Cell(s.name),
            Cell(r.path.name),
            number_cell(goodput.elapsed_s, ',.1f'),
            percent_cell(goodput.share, '.1f'),
            *(number_cell(seconds, ',.1f') for seconds in goodput.parts.values()),
        )
        for s, r in runs
        if (goodput := read_goodput(r))
    ]
    return Table(
        'Goodput, and seconds from the start of the program to run_stop',
        ('system', 'log', 'elapsed', 'goodput, %', *PARTS.values()),
        rows,
        'Goodput is the share of training and evaluation that the result is made of.',
    )


def splits_table(study: Study) -> Table:
    rows = [
        (
            number_cell(x.units),
            Cell(f'{x.faster.name}: {plural(x.faster.num_nodes or 0, "node")}'),
            number_cell(x.faster.images_per_s, ',.1f', training_refs(x.faster)),
            Cell(f'{x.slower.name}: {plural(x.slower.num_nodes or 0, "node")}'),
            number_cell(x.slower.images_per_s, ',.1f', training_refs(x.slower)),
            percent_cell(x.difference, '.1f', training_refs(x.faster, x.slower)),
            percent_cell(x.time_difference, '.1f', time_refs(x.faster, x.slower)),
        )
        for x in study.splits
    ]
    return Table(
        f'Equal numbers of {unit_name(study)} on different numbers of nodes',
        (
            unit_name(study),
            'faster',
            'images/s',
            'slower',
            'images/s',
            'faster by',
            'time to train shorter by',
        ),
        rows,
    )


def parts_table(study: Study) -> Table:
    rows = [
        (
            Cell(s.name),
            number_cell(
                p.init_s, ',.1f', tuple(x for r in s.scored for x in line_refs(r, keys.INIT_STOP))
            ),
            *(
                number_cell(seconds, ',.1f', time_refs(s) + training_refs(s))
                for seconds in (p.first_s, p.training_s, p.evaluation_s, p.other_s)
            ),
            number_cell(p.on_clock_s, ',.1f', time_refs(s)),
        )
        for s in study.run_sets
        if not s.refusal and (p := s.parts)
    ]
    return Table(
        'Time by phase, seconds per run',
        columns(
            'system | initialisation (before the clock) | first epoch | later epochs | '
            'evaluation | other | on the clock'
        ),
        rows,
    )


def energy_table(study: Study) -> Table:
    rows = [
        (
            Cell(s.name),
            number_cell(e.seconds, ',.1f', time_refs(s)),
            figures_cell(kwh(e.joules)),
            Cell(' and '.join(kind.upper() + 's' for kind in e.measured)),
            figures_cell(e.joules / e.seconds),
        )
        for s in study.run_sets
        if not s.refusal and (e := s.energy) and e.joules and e.seconds
    ]
    return Table(
        'Energy per run',
        columns('system | run, s | kWh | devices | mean W'),
        rows,
        'Energy is summed over all nodes, from run_start to run_stop.',
    )


def energy_notes(run_set: RunSet) -> list[Finding]:
    """Return why energy was not measured, by kind of device, unless all runs lack it for an
    expected reason."""
    notes = []
    for kind in KINDS:
        missing = [
            (p.name, e.reasons[kind]) for p, e in run_set.energies.items() if kind in e.reasons
        ]
        odd = [
            m
            for m in missing
            if m[1] not in (NO_TELEMETRY, NO_COUNTERS) or len(missing) < len(run_set.energies)
        ]
        notes += [
            make_finding(
                'energy_missing', None, kind.upper(), len(odd), len(run_set.runs), name, reason
            )
            for name, reason in odd[:1]
        ]
    return notes


def reads_table(study: Study) -> Table:
    """Return the table of training data that each node read, in each system's first run with these
    metrics."""
    rows = []
    for run_set, node in (
        (s, n) for s in study.run_sets for n in next(filter(None, map(read_node_reads, s.runs)), [])
    ):
        first, later = ((node.path, node.first_line),), ((node.path, node.last_line),)
        rows.append(
            (
                Cell(run_set.name),
                Cell(node.host),
                number_cell(node.first_bytes / 1e6, ',.2f', first),
                percent_cell(ratio(node.first_new_bytes, node.first_bytes), '.1f', first),
                number_cell(
                    None if node.later_bytes is None else node.later_bytes / 1e6, ',.2f', later
                ),
                percent_cell(ratio(node.later_new_bytes, node.later_bytes), '.1f', later),
            )
        )
    return Table(
        'Training records read by each node per epoch',
        columns('system | node | first epoch, MB | of them new | later epochs, MB | of them new'),
        rows,
        'Values are from the first run with these metrics; later epochs are averaged. New bytes '
        'were read for the '
        'first time since the run started or resumed; other bytes may come from the page cache.',
    )


def rcp_table(study: Study) -> Table:
    rows = [
        (
            Cell(s.name),
            number_cell(s.global_batch_size),
            *(
                number_cell(epochs, ',.2f')
                for epochs in (v.epochs, v.reference_epochs, v.min_epochs)
            ),
            Cell(f'{ROUND_OF[v.ruleset]}{"" if v.is_of_round else f" ({s.round} has none)"}'),
            Cell(v.text),
        )
        for s in study.run_sets
        if (v := rcp.check_rcp(s))
    ]
    return Table(
        'Epochs against the reference convergence points',
        columns('system | global batch | epochs | reference | at least | round | official check'),
        rows,
        'Epochs are the mean as logged, without the runs with the fewest and the most.',
    )
