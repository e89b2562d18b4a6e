"""Facts about a live run as text, for the terminal, the HTML page and one-line output."""

from operator import itemgetter

from mlperf_rn50.analysis.watch.run_state import STARTING, WAITING, BandPoint, LiveRun, to_json
from mlperf_rn50.answer import STATUS_LEVELS, Answer, Cell, Table, number_cell, percent_cell
from mlperf_rn50.text import (
    data_name,
    duration,
    grouped,
    money,
    percent,
    plural,
    printable,
    significant,
    some,
    span,
)

_SLOW = 0.10  # minimum rank skew that is shown as a warning
_MAX_ROWS = 400  # evaluations in a table
_MAX_NAMED = 6  # maximum nodes or run numbers listed in a fact
# A live run is well while it is running, and an aborted one has missed its target.
LIVE_LEVELS = STATUS_LEVELS | {'running': 'good', 'aborted': 'bad', WAITING: '', STARTING: ''}


def _known(form: str, value: float | str | None) -> str:
    return '' if value is None else form.format(value)


def _joined(*parts: str, by: str = ', ') -> str:
    return by.join(filter(None, parts))


def status_word(run: LiveRun) -> str:
    """Return the run's status, or 'killed' if it is 'failed' and the log has no run_stop."""
    return 'killed' if run.status == 'failed' and not run.has_end else run.status


def _clock(run: LiveRun) -> str:
    return f', {duration(run.time_s)} since the start' if run.time_s else ''


def status_text(run: LiveRun) -> str:
    word = status_word(run)
    resume = _known('; resumable from step {}', run.checkpoints.step)
    age = None if run.quiet_s is None else duration(run.quiet_s)
    if word in (WAITING, STARTING):
        return run.note
    if word == 'running':
        return word + _known(', last written {} ago', age)
    if word == 'killed':
        return (
            f'killed: the log has no end, and nothing was written for {age or "an unknown time"}'
            f'{resume}'
        )
    epochs = ''
    if word == 'converged' and run.evaluations:
        epochs = f' after {run.evaluations[-1].epoch:g} epochs'
    return f'{word}{epochs}{_clock(run)}{resume if word == "interrupted" else ""}'


def run_heading(run: LiveRun) -> str:
    return printable(run.path) + _known(', run {}', run.number)


def epoch_text(run: LiveRun) -> str:
    return '-' if run.epoch is None else f'{run.epoch:.2f}' + _known(' of {}', run.max_epochs)


def accuracy_text(run: LiveRun) -> str:
    """Return the last accuracy and, if an earlier one was as good or better, the best."""
    if not run.evaluations:
        return 'no evaluation yet'
    last, best = run.evaluations[-1], max(run.evaluations, key=lambda e: e.accuracy)
    text = f'{percent(last.accuracy)} at epoch {last.epoch}'
    return (
        text
        if best.epoch == last.epoch
        else f'{text}, best {percent(best.accuracy)} at {best.epoch}'
    )


def _speed(run: LiveRun) -> str:
    parts = (
        _known('{:,.0f} images/s', run.images_per_s),
        _known('{} s/epoch', significant(run.epoch_s) if run.epoch_s else None),
        _known('loss {:.4g}', run.loss),
        _known('learning rate {:.4g}', run.learning_rate),
    )
    return _joined(*parts) or '-'


def _reference(run: LiveRun) -> str:
    if run.standing:
        return f'at epoch {run.standing_epoch}: {run.standing}'
    return run.reference_text.removeprefix('reference: ')


def _time_to_target(run: LiveRun) -> str:
    if not (run.reference_left_s and run.reference_left_s[1] and run.reference_epochs):
        return ''  # unknown, or the references needed fewer epochs
    first, last = run.reference_epochs
    return (
        f'{span(*run.reference_left_s)}, if reached at epoch {first:g} to {last:g}, as in the '
        'reference runs'
    )


def _skew(run: LiveRun) -> str:
    if run.skew is None:
        return ''
    slowest = max(run.ranks, key=lambda r: r.own_s)
    wait = sum(r.wait_s for r in run.ranks) / len(run.ranks)
    host = f' on {printable(slowest.host)}' if slowest.host else ''
    return (
        f'{100 * run.skew:.1f} % above the median: rank {slowest.rank}{host} takes '
        f'{slowest.own_s:.3g} s per step; ranks wait {wait:.3g} s per step on average'
    )


def _checkpoints(run: LiveRun) -> str:
    kept = run.checkpoints
    if not kept.count:
        return 'none'
    age = '' if kept.age_s is None else f', written {duration(kept.age_s)} ago'
    return f'{kept.count} kept, newest at step {kept.step}{age}'


def _hours(run: LiveRun, price: float | None) -> str:
    if run.has_changed_nodes:
        return 'unknown, because a resume has changed the number of nodes'
    parts = []
    for hours, when in (
        (run.node_hours(), 'so far'),
        (run.node_hours(run.left_s), f'at epoch {run.max_epochs}'),
    ):
        if hours is not None:
            cost = '' if price is None else f' (cost {money(hours * price)})'
            parts.append(f'{significant(hours)} {when}{cost}')
    return _joined(*parts)


def _energy(run: LiveRun) -> str:
    used = run.energy
    if used is None or used.kwh is None:
        return _joined('not measured', used.reason if used else '', by=': ')
    cpu, gpu = (
        'not measured' if kwh is None else significant(kwh) for kwh in (used.cpu_kwh, used.gpu_kwh)
    )
    text = f'{significant(used.kwh)} kWh in {duration(used.seconds)} (CPU {cpu}, GPU {gpu})'
    if run.left_s is None or not used.seconds:
        return text
    at_end = used.kwh * (1 + run.left_s / used.seconds)
    return f'{text}, {significant(at_end)} kWh at epoch {run.max_epochs}'


def _nodes(run: LiveRun) -> str:
    shown = [
        printable(n.host)
        + _known(' CPU {:.0f} %', n.cpu_percent)
        + _known(' GPU {:.0f} %', n.gpu_percent)
        + _known(' power {:.0f} W', n.gpu_power_w)
        for n in run.nodes[:_MAX_NAMED]
    ]
    more = len(run.nodes) - len(shown)
    return _joined(*shown, f'and {more} more' if more else '', by='; ')


def _others(run: LiveRun) -> str:
    """Return the numbers of the folder's other runs, grouped by status."""
    parts = []
    for status, others in grouped(run.others, itemgetter(1)).items():
        n = [number for number, _ in others]
        if len(n) > 2 and n[-1] - n[0] == len(n) - 1:
            numbers = f'{n[0]} to {n[-1]}'
        else:
            numbers = some(n, _MAX_NAMED)
        parts.append(f'run{"" if len(n) == 1 else "s"} {numbers} {status}')
    return '; '.join(parts)


def _resumed(run: LiveRun) -> str:
    times = plural(run.num_resumes, 'time') if run.num_resumes else ''
    return f'{times}; {run.elapsed_parts.text}' if run.elapsed_parts else times


def _progress(run: LiveRun, price: float | None) -> dict[str, str]:
    """Return the facts that come from a run's log, metrics and checkpoints."""
    left = '' if run.left_s is None else duration(run.left_s)
    return {
        'run': _joined(
            printable(data_name(run.dataset)),
            plural(run.num_nodes, 'node') if run.num_nodes else '',
            plural(run.num_ranks, 'rank') if run.num_ranks else '',
            _known('batch {}', run.global_batch_size),
            run.opt_name or '',
            _known('seed {}', run.seed),
        ),
        'epoch': epoch_text(run) + (_clock(run) if run.status == 'running' else ''),
        'Top-1': accuracy_text(run)
        + ('' if run.target is None else f', target {percent(run.target)}'),
        'reference': _reference(run),
        'speed': _speed(run),
        'limit': run.limit.partition(';')[0],  # one line on a small terminal
        'rank skew': _skew(run),
        'left': left and f'{left} to epoch {run.max_epochs}, the end of the schedule',
        'target in': _time_to_target(run),
        'checkpoints': _checkpoints(run),
        'node-hours': _hours(run, price),
        'energy': _energy(run),
        'goodput': run.goodput.text if run.goodput else '',
    }


def facts_of(run: LiveRun, price: float | None = None) -> Table:
    """Return all known facts; price is the cost of a node-hour."""
    has_started = run.status not in (WAITING, STARTING) or run.has_end  # one that resumes had ended
    attempts = ''
    if run.attempts:
        attempts = f'{len(run.attempts)} by the launcher, latest: {run.attempts[-1]}'
    facts = {
        'status': status_text(run),
        'resumed': _resumed(run),
        **(_progress(run, price) if has_started else {}),
        'nodes': '' if run.has_end else _nodes(run),
        'attempts': attempts,
        'other runs': _others(run),
    }
    levels = {'status': LIVE_LEVELS[run.status]}
    if run.standing and run.is_behind:
        levels['reference'] = 'bad'
    if run.skew is not None and run.skew >= _SLOW:
        levels['rank skew'] = 'warn'
    rows = [
        (Cell(name), Cell(text, level=levels.get(name, ''))) for name, text in facts.items() if text
    ]
    return Table('', (), rows)


def _evaluations_table(run: LiveRun) -> Table:
    """Return the evaluations next to the reference band, newest first."""
    band = {b.epoch: b for b in run.band}
    rows = []
    for e in reversed(run.evaluations[-_MAX_ROWS:]):
        known = band.get(e.epoch, BandPoint(e.epoch, None, None, None))
        row = [number_cell(e.epoch, 'g'), percent_cell(e.accuracy, '.2f')]
        if run.band:
            text = '-'
            if known.low is not None and known.high is not None:
                text = f'{100 * known.low:.2f} to {100 * known.high:.2f}'
            row += [percent_cell(known.mean, '.2f'), Cell(text, known.low)]
        row.append(number_cell(None if e.time_s is None else e.time_s / 60, '.1f'))
        rows.append(row)
    reference = ('reference', 'band, %') if run.band else ()
    return Table('Evaluations', ('epoch', 'Top-1', *reference, 'time, min'), rows)


def answer_of(run: LiveRun, price: float | None) -> Answer:
    """Return the state of a run; price is the cost of a node-hour."""
    return Answer(
        title=f'{run_heading(run)}: {status_word(run)}',
        sentences=[(Cell(text, level='bad'),) for text in run.warnings],
        tables=[facts_of(run, price)],
        parts=[Answer(tables=[_evaluations_table(run)])],
        data=to_json(run, price),
    )


def line_of(run: LiveRun) -> str:
    """Return one line about a run, for output to a file or pipe instead of a terminal."""
    text = run.note
    if run.status not in (WAITING, STARTING):
        text = _joined(
            status_text(run),
            f'epoch {epoch_text(run)}',
            accuracy_text(run),
            _known('{:,.0f} images/s', run.images_per_s),
            '' if run.left_s is None else f'{duration(run.left_s)} left',
            run.standing,
            by='; ',
        )
    return f'{run_heading(run)}: {text}'
