"""Facts about a live run as text, for the terminal, the HTML page and one-line output."""

from operator import itemgetter
from typing import NamedTuple

from mlperf_rn50.analysis.watch.run_state import STARTING, WAITING, LiveRun
from mlperf_rn50.text import (
    data_name,
    duration,
    grouped,
    money,
    percent,
    plural,
    printable,
    some,
    span,
)

_SLOW = 0.10  # minimum rank skew that is shown as a warning
_MAX_NAMED = 6  # maximum nodes or run numbers listed in a fact
STATUS_LEVELS = {
    'converged': 'good',
    'running': 'good',
    'interrupted': 'warn',
    'aborted': 'bad',
    'failed': 'bad',
    'unreadable': 'bad',
    WAITING: '',
    STARTING: '',
}


class Fact(NamedTuple):
    name: str
    text: str
    level: str = ''  # 'good', 'warn', 'bad' or '' for neutral


def _known(form: str, value: float | str | None) -> str:
    return '' if value is None else form.format(value)


def status_word(run: LiveRun) -> str:
    """Return the run's status, or 'killed' if it is 'failed' and the log has no run_stop."""
    return 'killed' if run.status == 'failed' and not run.has_end else run.status


def status_text(run: LiveRun) -> str:
    word, resume = status_word(run), _known('; resumable from step {}', run.checkpoints.step)
    if run.status in (WAITING, STARTING):
        return run.note
    if word == 'killed':
        age = 'an unknown time' if run.quiet_s is None else duration(run.quiet_s)
        return f'killed: the log has no end, and nothing was written for {age}{resume}'
    if word == 'running':
        return word if run.quiet_s is None else f'{word}, last written {duration(run.quiet_s)} ago'
    epochs = (
        f' after {run.evaluations[-1].epoch:g} epochs'
        if word == 'converged' and run.evaluations
        else ''
    )
    clock = f', {duration(run.time_s)} since the start' if run.time_s else ''
    return f'{word}{epochs}{clock}{resume if word == "interrupted" else ""}'


def run_heading(run: LiveRun) -> str:
    return printable(run.path) + _known(', run {}', run.number)


def _setup(run: LiveRun) -> str:
    parts = [
        printable(data_name(run.dataset)),
        plural(run.num_nodes, 'node') if run.num_nodes else '',
        plural(run.num_ranks, 'rank') if run.num_ranks else '',
        _known('batch {}', run.global_batch_size),
        run.opt_name or '',
        _known('seed {}', run.seed),
    ]
    return ', '.join(filter(None, parts))


def epoch_text(run: LiveRun) -> str:
    return '-' if run.epoch is None else f'{run.epoch:.2f}' + _known(' of {}', run.max_epochs)


def accuracy_text(run: LiveRun) -> str:
    """Return the last accuracy and, if an earlier one was as good or better, the best."""
    if not run.evaluations:
        return 'no evaluation yet'
    last, best = run.evaluations[-1], max(run.evaluations, key=lambda e: e.accuracy)
    best_text = (
        '' if best.epoch == last.epoch else f', best {percent(best.accuracy)} at {best.epoch}'
    )
    return f'{percent(last.accuracy)} at epoch {last.epoch}{best_text}'


def _speed(run: LiveRun) -> str:
    parts = [
        _known('{:,.0f} images/s', run.images_per_s),
        _known('{:.3g} s/epoch', run.epoch_s or None),
        _known('loss {:.4g}', run.loss),
        _known('learning rate {:.4g}', run.learning_rate),
    ]
    return ', '.join(filter(None, parts)) or '-'


def _time_to_target(run: LiveRun) -> str:
    if not (run.reference_left_s and run.reference_epochs):
        return ''
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
        f'{slowest.own_s:.3g} s per step; '
        f'ranks wait {wait:.3g} s per step on average'
    )


def _checkpoints(run: LiveRun) -> str:
    kept = run.checkpoints
    age = '' if kept.age_s is None else f', written {duration(kept.age_s)} ago'
    return f'{kept.count} kept, newest at step {kept.step}{age}' if kept.count else 'none'


def _hours(run: LiveRun, price: float | None) -> str:
    pairs = (run.node_hours(), 'so far'), (run.node_hours(run.left_s), f'at epoch {run.max_epochs}')
    return ', '.join(
        f'{hours:.3g} {when}' + ('' if price is None else f' (cost {money(hours * price)})')
        for hours, when in pairs
        if hours is not None
    )


def _energy(run: LiveRun) -> str:
    used = run.energy
    if used is None or used.kwh is None:
        return 'not measured' + (f': {used.reason}' if used and used.reason else '')
    parts = [
        f'{name} {"not measured" if value is None else f"{value:.3g}"}'
        for name, value in (('CPU', used.cpu_kwh), ('GPU', used.gpu_kwh))
    ]
    text = f'{used.kwh:.3g} kWh in {duration(used.seconds)} ({", ".join(parts)})'
    if run.left_s is None or not run.time_s or not used.seconds:
        return text
    return (
        f'{text}, {used.kwh * (run.time_s + run.left_s) / used.seconds:.3g} kWh at epoch '
        f'{run.max_epochs}'
    )


def _nodes(run: LiveRun) -> str:
    shown = [
        printable(n.host)
        + _known(' CPU {:.0f} %', n.cpu_percent)
        + _known(' GPU {:.0f} %', n.gpu_percent)
        + _known(' power {:.0f} W', n.gpu_power_w)
        for n in run.nodes[:_MAX_NAMED]
    ]
    more = len(run.nodes) - len(shown)
    return '; '.join(shown) + (f'; and {more} more' if more else '')


def _others(run: LiveRun) -> str:
    """Return the numbers of the folder's other runs, grouped by status."""

    def names(n: list[int]) -> str:
        is_range = len(n) > 2 and n[-1] - n[0] == len(n) - 1
        return (
            f'runs {n[0]} to {n[-1]}'
            if is_range
            else f'run{"" if len(n) == 1 else "s"} {some(n, _MAX_NAMED)}'
        )

    return '; '.join(
        f'{names([number for number, _ in others])} {status}'
        for status, others in grouped(run.others, itemgetter(1)).items()
    )


def _resumed(run: LiveRun) -> str:
    times = plural(run.num_resumes, 'time') if run.num_resumes else ''
    return f'{times}; {run.elapsed_parts.text}' if run.elapsed_parts else times


def _progress(run: LiveRun, price: float | None) -> list[Fact]:
    """Return the facts that come from a run's log, metrics and checkpoints."""
    clock = (
        f', {duration(run.time_s)} since the start'
        if run.time_s and run.status == 'running'
        else ''
    )
    reference = (
        f'at epoch {run.standing_epoch}: {run.standing}'
        if run.standing
        else run.reference_text.removeprefix('reference: ')
    )
    return [
        Fact('run', _setup(run)),
        Fact('epoch', epoch_text(run) + clock),
        Fact(
            'Top-1',
            accuracy_text(run) + ('' if run.target is None else f', target {percent(run.target)}'),
        ),
        Fact('reference', reference, 'bad' if run.standing and run.is_behind else ''),
        Fact('speed', _speed(run)),
        Fact('limit', run.limit.partition(';')[0]),  # one line on a small terminal
        Fact('rank skew', _skew(run), 'warn' if run.skew is not None and run.skew >= _SLOW else ''),
        Fact(
            'left',
            ''
            if run.left_s is None
            else f'{duration(run.left_s)} to epoch {run.max_epochs}, the end of the schedule',
        ),
        Fact('target in', _time_to_target(run)),
        Fact('checkpoints', _checkpoints(run)),
        Fact('node-hours', _hours(run, price)),
        Fact('energy', _energy(run)),
    ]


def facts_of(run: LiveRun, price: float | None = None) -> list[Fact]:
    """Return all known facts; price is the cost of a node-hour."""
    has_started = run.status not in (WAITING, STARTING) or run.has_end  # one that resumes had ended
    attempts = (
        f'{len(run.attempts)} by the launcher, latest: {run.attempts[-1]}' if run.attempts else ''
    )
    facts = [
        Fact('status', status_text(run), STATUS_LEVELS[run.status]),
        Fact('resumed', _resumed(run)),
        *(_progress(run, price) if has_started else []),
        Fact('nodes', '' if run.has_end else _nodes(run)),
        Fact('attempts', attempts),
        Fact('other runs', _others(run)),
    ]
    return [f for f in facts if f.text]


def line_of(run: LiveRun) -> str:
    """Return one line about a run, for output to a file or pipe instead of a terminal."""
    if run.status in (WAITING, STARTING):
        return f'{run_heading(run)}: {run.note}'
    parts = [
        status_text(run),
        f'epoch {epoch_text(run)}',
        accuracy_text(run),
        _known('{:,.0f} images/s', run.images_per_s),
        '' if run.left_s is None else f'{duration(run.left_s)} left',
        run.standing,
    ]
    return f'{run_heading(run)}: {"; ".join(filter(None, parts))}'
