"""Sees runs through to their end: the layout, the doctor, each attempt, what it came to, and what follows."""
from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USAGE, ConfigError
from mlperf_rn50.launch.attempts import (
    OVER,
    Attempt,
    RunProgress,
    end_of,
    judge,
    look,
    mark,
    newest_run,
    note_attempt,
    place_of,
    read_metrics,
    stuck_attempts,
)
from mlperf_rn50.launch.options import Options
from mlperf_rn50.launch.process import Signals
from mlperf_rn50.train.checkpoint.checkpoint import newest_step
from mlperf_rn50.train.checkpoint.run_folder import RunFolder, run_numbers
from mlperf_rn50.train.watchdog.host_failures import Failure, note_failure, read_failures

# Failures of a host, in attempts in a row that gained nothing, after which --elastic leaves it out.
MAX_FAILURES = 2
# Hosts that do not answer are waited for so long before a restart.
_WAIT_LIMIT_S = 60.0
_ASK_AGAIN_S = 2.0


@dataclass(frozen=True)
class RunPlace:
    """Where a run goes, and how its ranks are laid out; hosts is localhost, once per node, without ssh."""

    run_dir: Path
    hosts: tuple[str, ...]
    ranks_per_node: int

    @property
    def slots(self) -> str:
        """The hosts as the scripts of launch/engines/ take them."""
        return ','.join(f'{host}:{self.ranks_per_node}' for host in self.hosts)


@dataclass(frozen=True)
class World:
    """What the supervisor needs of the outside.

    Args:
        start: run a command on all ranks of a layout, under a job name, and return its exit code; end it when the
            limit of a start is over and the last argument returns False.
        silent: return those of some hosts that do not answer.
    """

    start: Callable[[RunPlace, str, Sequence[str], Callable[[], bool]], int]
    silent: Callable[[Sequence[str]], list[str]]
    say: Callable[[str], None]
    signals: Signals


@dataclass
class Supervisor:
    """One launcher at work.

    Args:
        has_ssh: whether to ask the hosts of the layout if they answer.
        batch_job: what a requeued job has in common with its earlier starts.
    """

    world: World
    options: Options
    layout: RunPlace
    has_ssh: bool
    batch_job: str
    token: str
    _stuck: dict[str, RunPlace] = field(default_factory=dict)  # by job, since the last one that gained something
    _num_jobs: int = 0

    def run_all(self) -> int:
        """All runs that were asked for, one after another; the worst exit code."""
        worst = 0
        for is_resumed in plan_runs(self.layout.run_dir, self.options):
            code = self.run_to_end(is_resumed)
            worst = max(worst, code)
            if self.world.signals.is_asked or code == EXIT_USAGE:
                break
        return EXIT_AT_ONCE if self.world.signals.is_at_once else worst

    def run_to_end(self, is_resumed: bool) -> int:
        """One run through its restarts; its exit code: 0 converged, 1 not, 2 a mistake, 75 can be resumed."""
        world, restarts_left = self.world, self.options.restarts
        self._stuck.clear()
        how = self.way_to_begin(newest_run(self.layout.run_dir) if is_resumed else None)
        while True:
            self._num_jobs += 1
            job, before = f'{self.token}-{self._num_jobs}', mark(self.layout.run_dir)
            code = self._examine(job, how)
            is_fit = not code
            if not is_fit and not world.signals.is_asked and self._is_finding(job, code) and (
                    code == EXIT_USAGE or self._num_jobs == 1 or not restarts_left):
                return code
            if is_fit and not world.signals.is_asked:
                code = self._start(job, ['train', *how], partial(self._has_begun, before))
            attempt = look(self.layout.run_dir, before, code, how[0] == '--resume')
            if attempt.end == 'interrupted' and self._has_lost_a_host(code):
                attempt = replace(attempt, end=None)
            num_stuck = self._note(job, attempt)
            verdict = judge(attempt, world.signals.is_asked, restarts_left, num_stuck)
            if not attempt.end and not world.signals.is_asked:
                self.describe_failure(job, attempt)
            if verdict.reason:
                world.say(verdict.reason)
            if verdict.what == 'end':
                return verdict.exit_code
            restarts_left -= 1
            if verdict.pause_s:
                world.say(f'waiting {verdict.pause_s:.0f} s: the last attempt gained no steps')
                world.signals.pause(verdict.pause_s)
            if not self.regroup():
                return EXIT_FAILED
            if world.signals.is_asked:
                return EXIT_RESUMABLE if attempt.can_resume else EXIT_FAILED
            how = self.way_to_begin(RunFolder(self.layout.run_dir, attempt.run) if attempt.run is not None else None)
            world.say(f'restart {self.options.restarts - restarts_left} of {self.options.restarts}: {" ".join(how)}')

    def _has_lost_a_host(self, code: int) -> bool:
        """Return whether a lost host, whose guard asks its ranks to stop, interrupted a run, and not a user."""
        if self.world.signals.is_asked or not self.has_ssh:
            return False
        return code == EXIT_FAILED or bool(self.world.silent(self.layout.hosts))

    def way_to_begin(self, run: RunFolder | None) -> list[str]:
        """Return the options of train that resume or begin a run; raise ConfigError where neither is possible."""
        if run and newest_step(run.checkpoints) >= 0:
            return ['--resume', str(run.checkpoints), *(['--elastic'] if self.options.elastic else [])]
        if not self.options.config:
            raise ConfigError(f'--resume: {self.layout.run_dir} holds no checkpoint of its newest run; start it anew '
                              'with --config')
        return ['--config', self.options.config, '--run.dir', str(self.layout.run_dir)]

    def _has_begun(self, before: RunProgress) -> bool:
        """Whether the ranks of an attempt have written something: from then on they watch themselves."""
        return mark(self.layout.run_dir) != before

    def _start(self, job: str, words: Sequence[str], has_begun: Callable[[], bool]) -> int:
        """A command of the program on all ranks, with the layout it is started in."""
        layout = self.layout
        return self.world.start(layout, job, [
            *words, *self.options.train, '--run.num_nodes', str(len(layout.hosts)), '--run.ranks_per_node',
            str(layout.ranks_per_node), '--run.ranks_per_device', str(self.options.ranks_per_device)],
            has_begun)

    def _examine(self, job: str, how: Sequence[str]) -> int:
        """Every node is looked at before the run starts on it."""
        if not self.options.doctor or self.world.signals.is_asked:
            return 0
        # A job of its own: its guards end what is left of it.
        return self._start(f'{job}d', ['doctor', '--quiet', *how], lambda: False)

    def _is_finding(self, job: str, code: int) -> bool:
        """Return whether the doctor found a fault itself; a killed rank or a lost host is a failed attempt."""
        if code != EXIT_FAILED:
            return code == EXIT_USAGE
        is_blamed = any(f.job == f'{job}d' for f in read_failures(self.layout.run_dir))
        return not is_blamed and not (self.has_ssh and self.world.silent(self.layout.hosts))

    def _note(self, job: str, attempt: Attempt) -> int:
        """Writes an attempt down; how many of the last ones gained nothing, those before a requeue included."""
        if attempt.end or not self.world.signals.is_asked:  # an attempt that was stopped says nothing of the next one
            note_attempt(self.layout.run_dir, self.batch_job, attempt)
        self._stuck = {} if attempt.gained else {**self._stuck, job: self.layout}
        return max(len(self._stuck), stuck_attempts(self.layout.run_dir, self.batch_job))

    def describe_failure(self, job: str, attempt: Attempt) -> None:
        """Says where an attempt failed, and which hosts do not answer."""
        layout = self.layout
        where = 'before a run began' if attempt.run is None else \
            f'last recorded: {place_of(RunFolder(layout.run_dir, attempt.run))}'
        silent = self.world.silent(layout.hosts) if self.has_ssh else []
        for host in silent:
            note_failure(layout.run_dir, Failure(job, host, 'does not answer'))
            self.world.say(f'host {host} (with rank {ranks_of(host, layout.hosts, layout.ranks_per_node)}) does not '
                           f'answer {platform.node()}; {where}')
        if not silent:
            self.world.say(f'the ranks ended with exit code {attempt.exit_code}; {where}')

    def regroup(self) -> bool:
        """Gets ready for another attempt: waits for silent hosts, or goes on without them; whether it can."""
        if not self.has_ssh:
            return True
        if self.options.elastic:
            bad = bad_hosts(self._failures(), self.layout.hosts)
            for host, cause in bad.items():
                self.world.say(f'going on without {host}, which failed twice and gained no steps ({cause})')
            self._leave_out(list(bad))
        deadline = time.monotonic() + _WAIT_LIMIT_S
        while silent := self.world.silent(self.layout.hosts):
            if self.options.elastic and len(silent) < len(self.layout.hosts):
                self.world.say(f'going on without {" ".join(silent)}')
                self._leave_out(silent)
                return True
            if self.world.signals.is_asked:
                return True
            if time.monotonic() >= deadline:
                self.world.say(f'{" ".join(silent)} did not come back')
                return False
            self.world.signals.pause(_ASK_AGAIN_S)
        return True

    def _failures(self) -> list[Failure]:
        """The failures of the attempts that gained nothing, with hosts as they were named to the launcher."""
        return [replace(f, host=name_of(f, layout.hosts, layout.ranks_per_node))
                for f in read_failures(self.layout.run_dir) if (layout := self._stuck.get(f.job))]

    def _leave_out(self, hosts: Sequence[str]) -> None:
        left = tuple(h for h in self.layout.hosts if h not in hosts)
        self.layout = RunPlace(self.layout.run_dir, left, self.layout.ranks_per_node)


def plan_runs(folder: Path, options: Options) -> list[bool]:
    """The runs to make, and whether each goes on with the newest one of the folder.

    With --resume, runs that are over count towards --seeds.
    """
    if not options.resume:
        return [False] * options.seeds
    if options.seeds == 1:
        return [True]
    ends = [end_of(read_metrics(RunFolder(folder, number))) for number in sorted(run_numbers(folder))]
    is_unfinished = bool(ends) and ends[-1] not in OVER
    num_over = sum(end in OVER for end in ends)
    return [True] * is_unfinished + [False] * (options.seeds - num_over - is_unfinished)


def name_of(failure: Failure, hosts: Sequence[str], ranks_per_node: int) -> str:
    """Return the host of a failure as it was named to the launcher, which may not be what it calls itself."""
    if failure.rank is None or failure.rank >= len(hosts) * ranks_per_node:
        return failure.host
    return hosts[failure.rank // ranks_per_node]


def bad_hosts(failures: Sequence[Failure], hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts in use that failed too often in attempts without gain, with their last cause; never all."""
    bad = {h: [f.cause for f in failures if f.host == h][-1] for h in hosts
           if len({f.job for f in failures if f.host == h}) >= MAX_FAILURES}
    return bad if len(bad) < len(hosts) else {}


def ranks_of(host: str, hosts: Sequence[str], ranks_per_node: int) -> str:
    """Return the ranks of a host, by its place in the list."""
    first = hosts.index(host) * ranks_per_node
    return ', '.join(str(rank) for rank in range(first, first + ranks_per_node))
