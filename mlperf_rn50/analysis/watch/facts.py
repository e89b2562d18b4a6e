"""What is said of a run that goes on, in words: the same in a terminal, on the page and in a log. Pure."""
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.analysis.watch.run_state import STARTING, WAITING, LiveRun, RunClock, Setup, cost_of
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.text import data_name, duration, money, percent, plural, some, span

_SLOW = 0.10  # from here on a skew is worth a look
_MAX_NAMED = 6


@dataclass(frozen=True)
class Fact:
    """A line of what is known; level: good, warn, bad, or '' for plain."""

    name: str
    text: str
    level: str = ''


def _known(form: str, value: float | str | None) -> str:
    """A value as words; '' where it is not known."""
    return '' if value is None else form.format(value)


def status_word(run: LiveRun) -> str:
    """The status in a word; a failed run whose log has no end was killed."""
    return 'killed' if run.status == 'failed' and not run.has_end else run.status


def level_of(run: LiveRun) -> str:
    """How good the status is."""
    return {'converged': 'good', 'running': 'good', 'interrupted': 'warn', 'aborted': 'bad', 'failed': 'bad',
            'unreadable': 'bad'}.get(run.status, '')


def status_text(run: LiveRun) -> str:
    """The status in a sentence."""
    word, quiet_s = status_word(run), run.place.quiet_s
    if run.status in (WAITING, STARTING):
        return run.note
    if word == 'killed':
        quiet = 'it is not known when' if quiet_s is None else f'nothing was written for {duration(quiet_s)}'
        return f'killed: its log has no end, and {quiet}{_resume(run)}'
    if word == 'running':
        return word if quiet_s is None else f'{word}, last written {duration(quiet_s)} ago'
    how = f' after {run.evaluations[-1].epoch:g} epochs' if word == 'converged' and run.evaluations else ''
    clock = f', {duration(run.clock.time_s)} on its clock' if run.clock.time_s else ''
    return f'{word}{how}{clock}{_resume(run) if word == "interrupted" else ""}'


def _resume(run: LiveRun) -> str:
    """From where a run can be gone on with."""
    return _known('; it can go on from step {}', run.place.checkpoints.step)


def heading(run: LiveRun) -> str:
    """Which run this is."""
    return printable(run.place.path) + _known(', run {}', run.place.number)


def _what(setup: Setup) -> str:
    parts = [printable(data_name(setup.dataset)), plural(setup.num_nodes, 'node') if setup.num_nodes else '',
             plural(setup.num_ranks, 'rank') if setup.num_ranks else '',
             _known('batch {}', setup.global_batch_size or None), setup.opt_name or '', _known('seed {}', setup.seed)]
    return ', '.join(filter(None, parts))


def epoch_text(clock: RunClock) -> str:
    """How far it is."""
    return '-' if clock.epoch is None else f'{clock.epoch:.2f}' + _known(' of {}', clock.max_epochs)


def accuracy_text(run: LiveRun) -> str:
    """The last and the best evaluation."""
    if not run.evaluations:
        return 'no evaluation yet'
    last, best = run.evaluations[-1], max(run.evaluations, key=lambda e: e.accuracy)
    text = f'{percent(last.accuracy)} at epoch {last.epoch}'
    if best.epoch != last.epoch:
        text += f', best {percent(best.accuracy)} at {best.epoch}'
    return text


def _speed(clock: RunClock) -> str:
    parts = [_known('{:,.0f} images/s', clock.images_per_s), _known('{:.3g} s/epoch', clock.epoch_s or None),
             _known('loss {:.4g}', clock.loss), _known('learning rate {:.4g}', clock.learning_rate)]
    return ', '.join(filter(None, parts)) or '-'


def _left(run: LiveRun) -> list[Fact]:
    """Time left: to the end of the schedule, and until the reference runs had converged."""
    facts = []
    if run.clock.left_s is not None:
        facts.append(Fact('left', f'{duration(run.clock.left_s)} to epoch {run.clock.max_epochs}, where it gives up'))
    if (left_s := run.reference.reference_left_s) and (ends := run.reference.reference_epochs):
        facts.append(Fact('target in', f'{span(*left_s)}, if it reaches it at epoch {ends[0]:g} to {ends[1]:g} as the '
                                       'reference runs did'))
    return facts


def _ranks(run: LiveRun) -> Fact:
    if run.skew is None:
        return Fact('rank skew', '')
    slowest = max(run.ranks, key=lambda r: r.own_s)
    wait = sum(r.wait_s for r in run.ranks) / len(run.ranks)
    where = f' on {printable(slowest.host)}' if slowest.host else ''
    return Fact('rank skew', f'{100 * run.skew:.1f} %: rank {slowest.rank}{where} takes {slowest.own_s:.3g} s a step '
                             f'itself, longer than the median one; ranks wait {wait:.3g} s a step on average',
                'warn' if run.skew >= _SLOW else '')


def _checkpoints(run: LiveRun) -> str:
    kept = run.place.checkpoints
    if not kept.count:
        return 'none'
    age = _known(', written {} ago', None if kept.age_s is None else duration(kept.age_s))
    return f'{kept.count} kept, the newest at step {kept.step}{age}'


def _hours(run: LiveRun, price: float | None) -> str:
    def said(hours: float | None, when: str) -> str:
        paid = cost_of(hours, price)
        return '' if hours is None else f'{hours:.3g} {when}{"" if paid is None else f" (cost {money(paid)})"}'
    return ', '.join(p for p in (said(run.node_hours, 'so far'),
                                 said(run.node_hours_at_end, f'at epoch {run.clock.max_epochs}')) if p)


def _energy(run: LiveRun) -> str:
    used, time_s, left_s = run.place.energy, run.clock.time_s, run.clock.left_s
    if used is None or used.kwh is None:
        return 'not measured' + (f': {used.reason}' if used and used.reason else '')
    parts = [f'{name} {"not measured" if value is None else f"{value:.3g}"}'
             for name, value in (('CPU', used.cpu_kwh), ('GPU', used.gpu_kwh))]
    text = f'{used.kwh:.3g} kWh in {duration(used.seconds)} ({", ".join(parts)})'
    if left_s is None or not time_s or not used.seconds:
        return text
    return f'{text}, {used.kwh * (time_s + left_s) / used.seconds:.3g} kWh at epoch {run.clock.max_epochs}'


def _nodes(run: LiveRun) -> str:
    shown = [printable(n.host) + _known(' CPU {:.0f} %', n.cpu_percent) + _known(' GPU {:.0f} %', n.gpu_percent)
             + _known(' power {:.0f} W', n.gpu_power_w) for n in run.place.nodes[:_MAX_NAMED]]
    more = len(run.place.nodes) - len(shown)
    return '; '.join(shown) + (f'; and {more} more' if more else '')


def others_text(run: LiveRun) -> str:
    """The other runs of the folder by their status."""
    by_status: dict[str, list[int]] = {}
    for number, status in run.place.others:
        by_status.setdefault(status, []).append(number)
    return '; '.join(f'{"run" if len(n) == 1 else "runs"} {_numbers(n)} {status}' for status, n in by_status.items())


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f'{numbers[0]} to {numbers[-1]}'
    return some(numbers, _MAX_NAMED)


def _reference(run: LiveRun) -> Fact:
    found = run.reference
    if found.verdict:
        return Fact('reference', f'at epoch {found.verdict_epoch}: {found.verdict}', 'bad' if found.is_behind else '')
    return Fact('reference', found.reference_text.removeprefix('reference: '))


def _progress(run: LiveRun, price: float | None) -> list[Fact]:
    """What the log and the metrics of a run tell."""
    clock = f', {duration(run.clock.time_s)} on its clock' if run.clock.time_s and run.status == 'running' else ''
    target = '' if run.setup.target is None else f', target {percent(run.setup.target)}'
    return [Fact('run', _what(run.setup)), Fact('epoch', epoch_text(run.clock) + clock),
            Fact('Top-1', accuracy_text(run) + target),
            _reference(run), Fact('speed', _speed(run.clock)), _ranks(run), *_left(run),
            Fact('checkpoints', _checkpoints(run)),
            Fact('resumed', plural(run.num_resumes, 'time') if run.num_resumes else ''),
            Fact('node-hours', _hours(run, price)), Fact('energy', _energy(run))]


def facts_of(run: LiveRun, price: float | None = None) -> list[Fact]:
    """All that is known of a run, in lines; price: of a node-hour."""
    has_begun = run.status not in (WAITING, STARTING)
    ended = run.place.attempts
    attempts = f'{len(ended)} by the launcher, the last: {ended[-1]}' if ended else ''
    facts = [Fact('status', status_text(run), level_of(run)), *(_progress(run, price) if has_begun else []),
             Fact('nodes', '' if run.has_end else _nodes(run)), Fact('attempts', attempts),
             Fact('other runs', others_text(run))]
    return [f for f in facts if f.text]


def line_of(run: LiveRun) -> str:
    """A run in one line, for a log of the watch itself."""
    if run.status in (WAITING, STARTING):
        return f'{heading(run)}: {run.note}'
    left_s = run.clock.left_s
    parts = [status_text(run), f'epoch {epoch_text(run.clock)}', accuracy_text(run),
             _known('{:,.0f} images/s', run.clock.images_per_s), '' if left_s is None else f'{duration(left_s)} left',
             run.reference.verdict]
    return f'{heading(run)}: {"; ".join(filter(None, parts))}'
