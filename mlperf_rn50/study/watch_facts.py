"""What is said of a run that goes on, in words: the same in a terminal, on the page and in a log. Pure."""
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.live import STARTING, WAITING, LiveRun, cost_of
from mlperf_rn50.study.text import data_name, duration, money, percent, plural, some, span

_SLOW = 0.10  # from here on a skew is worth a look
_MAX_NAMED = 6


@dataclass(frozen=True)
class Fact:
    """A line of what is known; level: good, warn, bad, or '' for plain."""

    name: str
    text: str
    level: str = ''


def _ago(run: LiveRun) -> str:
    return '' if run.quiet_s is None else f', last written {duration(run.quiet_s)} ago'


def status_word(run: LiveRun) -> str:
    """The status in a word; a failed run whose log has no end was killed."""
    return 'killed' if run.status == 'failed' and not run.has_end else run.status


def level_of(run: LiveRun) -> str:
    """How good the status is."""
    return {'converged': 'good', 'running': 'good', 'interrupted': 'warn', 'aborted': 'bad', 'failed': 'bad',
            'unreadable': 'bad'}.get(run.status, '')


def status_text(run: LiveRun) -> str:
    """The status in a sentence."""
    word = status_word(run)
    if run.status in (WAITING, STARTING):
        return run.note
    if word == 'killed':
        quiet = 'it is not known when' if run.quiet_s is None else f'nothing was written for {duration(run.quiet_s)}'
        return f'killed: its log has no end, and {quiet}{_resume(run)}'
    if word == 'running':
        return word + _ago(run)
    how = f' after {run.evaluations[-1].epoch:g} epochs' if word == 'converged' and run.evaluations else ''
    clock = f', {duration(run.time_s)} on its clock' if run.time_s else ''
    return f'{word}{how}{clock}{_resume(run) if word == "interrupted" else ""}'


def _resume(run: LiveRun) -> str:
    """From where a run can be gone on with."""
    return '' if run.checkpoints.step is None else f'; it can go on from step {run.checkpoints.step}'


def heading(run: LiveRun) -> str:
    """Which run this is."""
    return printable(run.path) + ('' if run.number is None else f', run {run.number}')


def _what(run: LiveRun) -> str:
    parts = [printable(data_name(run.dataset)),
             plural(run.num_nodes, 'node') if run.num_nodes else '',
             plural(run.num_ranks, 'rank') if run.num_ranks else '',
             f'batch {run.global_batch_size}' if run.global_batch_size else '', run.opt_name or '',
             f'seed {run.seed}' if run.seed is not None else '']
    return ', '.join(p for p in parts if p)


def epoch_text(run: LiveRun) -> str:
    """How far it is."""
    if run.epoch is None:
        return '-'
    return f'{run.epoch:.2f}' + (f' of {run.max_epochs}' if run.max_epochs else '')


def accuracy_text(run: LiveRun) -> str:
    """The last and the best evaluation."""
    if not run.evaluations:
        return 'no evaluation yet'
    last, best = run.evaluations[-1], run.best
    text = f'{percent(last.accuracy)} at epoch {last.epoch}'
    if best is not None and best.epoch != last.epoch:
        text += f', best {percent(best.accuracy)} at {best.epoch}'
    return text


def _speed(run: LiveRun) -> str:
    parts = [f'{run.images_per_s:,.0f} images/s' if run.images_per_s is not None else '',
             f'{run.epoch_s:.3g} s/epoch' if run.epoch_s else '',
             f'loss {run.loss:.4g}' if run.loss is not None else '',
             f'learning rate {run.learning_rate:.4g}' if run.learning_rate is not None else '']
    return ', '.join(p for p in parts if p) or '-'


def _left(run: LiveRun) -> list[Fact]:
    """Time left: to the end of the schedule, and until the reference runs had converged."""
    facts = []
    if run.left_s is not None:
        facts.append(Fact('left', f'{duration(run.left_s)} to epoch {run.max_epochs}, where it gives up'))
    if run.reference_left_s and run.reference_epochs:
        first, last = run.reference_epochs
        facts.append(Fact('target in', f'{span(*run.reference_left_s)}, if it reaches it at epoch {first:g} to '
                                       f'{last:g} as the reference runs did'))
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
    kept = run.checkpoints
    if not kept.count:
        return 'none'
    age = '' if kept.age_s is None else f', written {duration(kept.age_s)} ago'
    return f'{kept.count} kept, the newest at step {kept.step}{age}'


def _hours(run: LiveRun, price: float | None) -> str:
    def said(hours: float | None, when: str) -> str:
        paid = cost_of(hours, price)
        return '' if hours is None else f'{hours:.3g} {when}{"" if paid is None else f" (cost {money(paid)})"}'
    return ', '.join(p for p in (said(run.node_hours, 'so far'),
                                 said(run.node_hours_at_end, f'at epoch {run.max_epochs}')) if p)


def _energy(run: LiveRun) -> str:
    used = run.energy
    if used is None or used.kwh is None:
        return 'not measured' + (f': {used.reason}' if used and used.reason else '')
    parts = [f'{name} {"not measured" if value is None else f"{value:.3g}"}'
             for name, value in (('CPU', used.cpu_kwh), ('GPU', used.gpu_kwh))]
    text = f'{used.kwh:.3g} kWh in {duration(used.seconds)} ({", ".join(parts)})'
    if run.left_s is None or not run.time_s or not used.seconds:
        return text
    return f'{text}, {used.kwh * (run.time_s + run.left_s) / used.seconds:.3g} kWh at epoch {run.max_epochs}'


def _nodes(run: LiveRun) -> str:
    def said(name: str, value: float | None, unit: str) -> str:
        return '' if value is None else f' {name} {value:.0f} {unit}'
    shown = [printable(n.host) + said('CPU', n.cpu_percent, '%') + said('GPU', n.gpu_percent, '%')
             + said('power', n.gpu_power_w, 'W') for n in run.nodes[:_MAX_NAMED]]
    more = len(run.nodes) - len(shown)
    return '; '.join(shown) + (f'; and {more} more' if more else '')


def others_text(run: LiveRun) -> str:
    """The other runs of the folder by their status."""
    by_status: dict[str, list[int]] = {}
    for number, status in run.others:
        by_status.setdefault(status, []).append(number)
    return '; '.join(f'{"run" if len(n) == 1 else "runs"} {_numbers(n)} {status}' for status, n in by_status.items())


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f'{numbers[0]} to {numbers[-1]}'
    return some(numbers, _MAX_NAMED)


def _reference(run: LiveRun) -> Fact:
    if run.verdict:
        return Fact('reference', f'at epoch {run.verdict_epoch}: {run.verdict}', 'bad' if run.is_behind else '')
    return Fact('reference', run.reference_text.removeprefix('reference: '))


def _progress(run: LiveRun, price: float | None) -> list[Fact]:
    """What the log and the metrics of a run tell."""
    clock = f', {duration(run.time_s)} on its clock' if run.time_s and run.status == 'running' else ''
    target = '' if run.target is None else f', target {percent(run.target)}'
    return [Fact('run', _what(run)), Fact('epoch', epoch_text(run) + clock), Fact('Top-1', accuracy_text(run) + target),
            _reference(run), Fact('speed', _speed(run)), _ranks(run), *_left(run),
            Fact('checkpoints', _checkpoints(run)),
            Fact('resumed', plural(run.num_resumes, 'time') if run.num_resumes else ''),
            Fact('node-hours', _hours(run, price)), Fact('energy', _energy(run))]


def facts_of(run: LiveRun, price: float | None = None) -> list[Fact]:
    """All that is known of a run, in lines; price: of a node-hour."""
    has_begun = run.status not in (WAITING, STARTING)
    attempts = f'{len(run.attempts)} by the launcher, the last: {run.attempts[-1]}' if run.attempts else ''
    facts = [Fact('status', status_text(run), level_of(run)), *(_progress(run, price) if has_begun else []),
             Fact('nodes', '' if run.has_end else _nodes(run)), Fact('attempts', attempts),
             Fact('other runs', others_text(run))]
    return [f for f in facts if f.text]


def line_of(run: LiveRun) -> str:
    """A run in one line, for a log of the watch itself."""
    if run.status in (WAITING, STARTING):
        return f'{heading(run)}: {run.note}'
    parts = [status_text(run), f'epoch {epoch_text(run)}', accuracy_text(run)]
    parts += [f'{run.images_per_s:,.0f} images/s'] if run.images_per_s is not None else []
    parts += [f'{duration(run.left_s)} left'] if run.left_s is not None else []
    parts += [run.verdict] if run.verdict else []
    return f'{heading(run)}: {"; ".join(parts)}'
