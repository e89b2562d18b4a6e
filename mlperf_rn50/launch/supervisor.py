"""Supervision of runs: doctor, attempts and restarts."""

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlperf_rn50.errors import (
    EXIT_AT_ONCE,
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    ConfigError,
)
from mlperf_rn50.launch import attempts
from mlperf_rn50.launch.engines import Options
from mlperf_rn50.launch.placement import Placement
from mlperf_rn50.runfolder.locks import LAUNCHER_LOCK
from mlperf_rn50.runfolder.names import RunFolder, newest_run, newest_step
from mlperf_rn50.runfolder.records import (
    Attempt,
    Failure,
    note_attempt,
    note_failure,
    read_attempts,
    read_failures,
)
from mlperf_rn50.system.out_of_memory import explain_exit
from mlperf_rn50.system.signals import SignalQueue
from mlperf_rn50.text import plural

_DOCTOR = 'd'  # appended to an attempt's job name for its doctor
_SIGNAL_CODES = 128  # exit code of an engine that a signal has ended, less the number of the signal
NOT_REACHED = 'was not reached'  # cause of a host with which launch/guard.sh could not connect
_WAIT_LIMIT_S = 60.0  # maximum wait for silent hosts before a restart
ELASTIC_LIMIT_S = 30.0  # the same with --elastic, which then excludes them
_RETRY_S = 2.0  # pause between checks for silent hosts
# Returns the status of a run that has ended, '' before the end, None if no run has begun.
StatusReader = Callable[[], str | None]
# Returns whether a run that trains must write a checkpoint and end, because hosts have returned.
StopReader = Callable[[], bool]


@dataclass
class Supervisor:
    """Supervisor of the runs of one launcher; it reaches the hosts only through start and
    silent."""

    # Run a command on all ranks, under a job name.
    start: Callable[[Placement, str, Sequence[str], StatusReader | None, StopReader], int]
    # return silent hosts with reasons; none without ssh
    silent: Callable[[Sequence[str]], dict[str, str]]
    # return those of the excluded hosts that answer again, without a wait
    returned: Callable[[Sequence[str]], set[str]]
    say: Callable[[str], None]
    signals: SignalQueue
    options: Options
    placement: Placement
    batch_job: str  # name that is the same for all starts of a requeued job
    token: str
    first_run: int = 0  # runs of the folder with smaller numbers are of other jobs

    def __post_init__(self) -> None:
        self._placements: dict[str, Placement] = {}  # of each job since the newest checkpoint
        self._attempts: list[Attempt] = []  # including those before a requeue
        self._num_jobs = 0
        self._has_drilled = False  # whether ranks were started with the drill
        self._lock = self.placement.run_dir / LAUNCHER_LOCK
        self._has_lock = os.path.exists(self._lock)
        self._all_hosts = self.placement.hosts
        # excluded because they did not answer; hosts that failed while they answered stay excluded
        self._absent: list[str] = []
        self._returned: set[str] = set()  # answer again, to be taken back
        self._on_trial: set[str] = set()  # taken back for the present attempt
        self._num_relapses = Counter[str]()  # times that a host was silent just after its return

    def run_all(self) -> int:
        """Make all runs in turn; return the largest exit code or, after a second Ctrl-C,
        EXIT_AT_ONCE."""
        is_resume, seeds = bool(self.options.resume), self.options.seeds
        ends: list[str | None] = []
        if is_resume and seeds > 1:
            ends = attempts.patient(attempts.ends_of)(self.placement.run_dir, self.first_run)
        runs = attempts.plan_runs(ends, seeds, is_resume)
        attempts.check_plan(runs, self.options.config)
        if not runs:
            self.say(f'all {plural(len(ends), "run")} of --seeds have ended')
        counted = ends if is_resume and seeds > 1 else []
        worst = max((EXIT_CODES[end] for end in counted if end in attempts.OVER), default=EXIT_OK)
        for number, is_resumed in enumerate(runs, 1):
            self._ask_absent()
            self._take_back()
            code = self.run_to_end(is_resumed)
            if number == 1 and self._has_drilled and (run := self._present_run()):
                result = attempts.drill_result(run, self._attempts)
                self.say(f'drill {self.options.drill}: {result}')
            last = self._attempts[-1].end if self._attempts else ''
            is_over = last in attempts.OVER
            num_over = number if is_over else number - 1
            is_between = is_over or not self._attempts
            if self.signals.is_requested and is_between and 0 < num_over < len(runs):
                self.say(f'stopped after {num_over} of {plural(len(runs), "run")}')
                code = EXIT_RESUMABLE  # with the next run
            worst = max(worst, code)
            # interrupted without a request to the launcher: the ranks were stopped
            if self.signals.is_requested or last == 'interrupted' or code == EXIT_USAGE:
                break
        return EXIT_AT_ONCE if self.signals.is_forced and worst else worst

    def _present_run(self) -> RunFolder | None:
        """Return the run to resume; None if there is none."""
        if self.options.run:
            return self.options.run
        run = newest_run(self.placement.run_dir)
        return run if run and run.index >= self.first_run else None

    def run_to_end(self, is_resumed: bool) -> int:
        """Make one run with its restarts; return 0 if converged, 1 if not, 2 for a usage error, 75
        if resumable."""
        run_dir, chosen = self.placement.run_dir, self.options.run
        self._placements.clear()
        # Attempts of earlier runs of the same job do not count for a new run.
        self._attempts = read_attempts(run_dir, self.batch_job) if is_resumed else []
        resumed = self._present_run() if is_resumed else None
        train_options = self.train_options(resumed)
        restarts_left = self.options.restarts
        is_checked, is_first = False, True
        while True:
            self._num_jobs += 1
            job = f'{self.token}-{self._num_jobs}'
            before = attempts.patient_progress(run_dir, chosen)

            # the doctor, then the ranks
            code = doctor_code = 0 if is_checked else self._run_doctor(job, train_options)
            if self._found_fault(job, doctor_code, is_only=is_first or not restarts_left):
                return doctor_code
            if not doctor_code and not self.signals.is_requested:
                code = self._start(job, ['train', *train_options], partial(self._status, before))

            # the result, its cause, and what follows from it
            attempt = attempts.attempt_after(
                run_dir, before, exit_code=code, is_resumed=train_options[0] == '--resume'
            )
            if attempt.end == 'interrupted' and self._is_host_lost(job, code):
                # guards send the ranks a stop request if a host is lost
                attempt = replace(attempt, end=None)
            silent: dict[str, str] = {}
            if not attempt.end and not self.signals.is_requested:
                silent = self.silent(self.placement.hosts)
                attempt = self.explain_failure(job, attempt, silent)
            suspects = self._suspects(silent)
            is_free = not self.signals.is_requested and attempts.is_free_restart(
                attempt, self._returned, suspects
            )
            if is_free and attempt.end == 'interrupted':
                cause = f'stopped to take back {names_of(self._returned)}'
                attempt = replace(attempt, cause=cause)
            self._record(job, attempt, is_free)
            if is_free and attempt.end != 'interrupted':
                self.say(
                    f'excluding {names_of(suspects)} until the end, because the first start after '
                    'their return failed before a step'
                )
                self._exclude(suspects)
            end_code = self._decide(
                attempt, restarts_left, is_free=is_free, have_answered=not silent
            )
            if end_code is not None:
                return end_code

            # without the mount, a new run would begin in the folder below it
            if self._has_lock and not os.path.exists(self._lock):
                self.say(f'{run_dir} has vanished, perhaps with a mount; restore it and resume')
                return EXIT_FAILED

            # A restart checks the hosts again unless they passed, the cause was outside the program
            # and all answer.
            is_fit = not (doctor_code or silent or self._on_trial)
            is_checked = is_fit and attempt.origin == 'outside'
            is_first = False
            resumed = None if attempt.run is None else RunFolder(run_dir, attempt.run)
            train_options = self.train_options(resumed)
            what = f'resuming on {names_of(self.placement.hosts)}, which uses no restart'
            if not is_free:
                restarts_left -= 1
                what = f'restart {self.options.restarts - restarts_left} of {self.options.restarts}'
            self.say(f'{what}: {" ".join(train_options)}')

    def _decide(
        self, attempt: Attempt, restarts_left: int, is_free: bool, have_answered: bool
    ) -> int | None:
        """Return the launcher's exit code after an attempt, or None once the hosts are ready for
        the next one."""
        end_code, reason = attempts.judge(
            attempt,
            self.signals.is_requested,
            restarts_left,
            past=self._attempts,
            can_exclude=bool(self._bad_hosts()),
            is_free=is_free,
        )
        if reason:
            self.say(reason)
        if end_code is not None:
            return end_code
        if pause_s := attempts.pause_s(attempts.count_stuck(self._attempts)):
            self.say(f'waiting {pause_s:.0f} s because the last attempt wrote no newer checkpoint')
            self.signals.pause(pause_s)
        self._take_back()
        if not self.regroup(have_answered and not (pause_s or self._on_trial)):
            return EXIT_FAILED
        if self.signals.is_requested:
            return EXIT_RESUMABLE if attempt.can_resume else EXIT_FAILED
        return None

    def _found_fault(self, job: str, code: int, is_only: bool) -> bool:
        """Return whether a doctor that ended with this code found a fault, after which nothing is
        tried again; a killed rank or a lost host is a failed attempt instead.

        is_only: whether this is the first start of a run, or the last one that is allowed.
        """
        if self._on_trial or self.signals.is_requested or code not in (EXIT_FAILED, EXIT_USAGE):
            return False
        return code == EXIT_USAGE or is_only and not self._has_failure(job)

    def _is_host_lost(self, job: str, code: int) -> bool:
        """Return whether a run was interrupted because a host was lost, not by the user."""
        # a killed horovodrun stops its ranks; srun, in an image, may kill those that stop last
        is_killed = code > _SIGNAL_CODES and not (self._returned or self.options.image)
        if self.signals.is_requested or not (self.options.hosts or is_killed):
            return False
        return is_killed or code == EXIT_FAILED or self._has_failure(job)

    def _has_failure(self, job: str) -> bool:
        """Return whether a failure is recorded for a job, or a host does not answer."""
        return bool(self._failures(job) or self.silent(self.placement.hosts))

    def _failures(self, job: str) -> list[Failure]:
        return [f for f in read_failures(self.placement.run_dir) if f.job in (job, job + _DOCTOR)]

    def train_options(self, run: RunFolder | None) -> list[str]:
        """Return the options of train that resume or begin a run; raise ConfigError if neither is
        possible."""
        if run and newest_step(run.checkpoints) >= 0:
            # The run may have gone on from the given checkpoint or, with other ranks, replaced it.
            given = Path(str(self.options.resume))
            has_gained = any(a.gained for a in self._attempts)
            is_given = self.options.run and given.exists() and not has_gained
            path = given if is_given else run.checkpoints
            elastic = ['--elastic'] if self.options.elastic else []
            return ['--resume', str(path), *elastic]
        if not self.options.config:
            raise ConfigError(
                f'--resume: {self.placement.run_dir} has no checkpoint of its newest run; start a '
                'new run with --config'
            )
        # Without some hosts, train scales the learning rate of all hosts.
        elastic = ['--elastic'] if self.placement.hosts != self._all_hosts else []
        return ['--config', self.options.config, '--run.dir', str(self.placement.run_dir), *elastic]

    def _status(self, before: attempts.RunProgress) -> str | None:
        """Return None before the ranks write to the folder of a run, then '', and its status once
        it has ended and its checkpoint and networks are complete."""
        run_dir = self.placement.run_dir
        if attempts.read_progress(run_dir, before.chosen) == before:
            return None
        attempt = attempts.read_attempt(run_dir, before, exit_code=0, is_resumed=True)
        is_writing = attempt.run is not None and attempts.is_writing(
            RunFolder(run_dir, attempt.run)
        )
        return '' if is_writing else attempt.end or ''

    def _start(self, job: str, words: Sequence[str], status: StatusReader | None) -> int:
        what = 'starting' if words[0] == 'train' else 'checking the nodes with'
        self.say(f'{what} {plural(self.placement.num_ranks, "rank")}')
        is_new = words[:2] == ['train', '--config']
        values = {
            '--run.num_nodes': len(self._all_hosts if is_new else self.placement.hosts),
            '--run.ranks_per_node': self.placement.ranks_per_node,
            '--run.ranks_per_device': self.options.ranks_per_device,
        }
        layout = [word for name, number in values.items() for word in (name, str(number))]
        if self.options.drill and not self._has_drilled and words[0] == 'train':
            layout += ['--drill', str(self.options.drill)]
            self._has_drilled = True
        command = [*words, *self.options.train, *layout]
        return self.start(self.placement, job, command, status, self._find_returned)

    def _run_doctor(self, job: str, train_options: Sequence[str]) -> int:
        if not self.options.doctor or self.signals.is_requested:
            return 0
        # The doctor is a separate job, so that its guards end only its own processes.
        return self._start(job + _DOCTOR, ['doctor', '--quiet', *train_options], None)

    def _record(self, job: str, attempt: Attempt, is_free: bool) -> None:
        if attempt.end or not self.signals.is_requested:  # a stop request is not a failure
            note_attempt(self.placement.run_dir, self.batch_job, attempt)
            if attempt.gained or not is_free:  # a free failure does not count against the run
                self._attempts.append(attempt)
        if attempt.gained:
            self._placements.clear()
        else:
            self._placements[job] = self.placement

    def explain_failure(self, job: str, attempt: Attempt, silent: Mapping[str, str]) -> Attempt:
        """Report where an attempt failed and which hosts were lost; return it with cause and
        origin."""
        where = attempt.place if attempt.run is None else f'last recorded: {attempt.place}'
        code = attempt.exit_code
        is_killed = code > _SIGNAL_CODES
        if is_killed and not self._failures(job):
            self.signals.pause(_RETRY_S)  # until the ranks have recorded that they lost the engine
        for host in silent:
            failure = Failure(job, host, 'does not answer', is_outside=True)
            note_failure(self.placement.run_dir, failure)
        failures = self._failures(job)
        lost = self._lost_hosts(failures, silent)
        for host, cause in lost.items():
            ranks = self.placement.ranks_of(host)
            reason = f' ({silent[host]})' if silent.get(host) and NOT_REACHED not in cause else ''
            self.say(f'host {host} (with rank {ranks}) {cause}; {where}{reason}')

        explained = explain_exit(code)
        cause = ended = f'the ranks ended with exit code {code}{explained}'
        # A rank that fails is recorded, so this code is the engine's own, such as mpirun's after
        # the end of an ssh client. The ranks have trained, so the hosts need no further check.
        is_of_engine = bool(explained) and attempt.has_stepped
        origin = 'outside' if is_killed or is_of_engine else ''
        if failures:
            cause = self._describe(failures[0])
            origin = 'outside' if failures[0].is_outside else 'program'
        if not lost:  # ranks that lost the engine cannot print the cause
            self.say(f'{cause if is_killed else ended}; {where}')
        return replace(attempt, cause=cause, origin=origin)

    def _lost_hosts(self, failures: Sequence[Failure], silent: Mapping[str, str]) -> dict[str, str]:
        """Return the lost and silent hosts, with the first cause of each."""
        of_hosts = [f for f in failures if f.rank is None and f.host in self.placement.hosts]
        lost = {f.host: f.cause for f in reversed(of_hosts)}
        for host in silent:
            if not lost.get(host, '').startswith(NOT_REACHED):
                lost[host] = f'does not answer {platform.node()}'
        return lost

    def _describe(self, failure: Failure) -> str:
        """Return the cause of a failure with its host, if there is one, and its rank."""
        host = self.placement.name_of(failure) if self.options.hosts else failure.host
        if not host:
            return failure.cause
        if failure.rank is None:
            return f'host {host} {failure.cause}'
        return f'rank {failure.rank} on {host}: {failure.cause}'

    def regroup(self, have_answered: bool) -> bool:
        """Exclude failing hosts; wait for silent hosts or exclude them, unless all have just
        answered; return whether another attempt is possible."""
        for host, cause in self._bad_hosts().items():
            self.say(
                f'excluding {host} after {attempts.MAX_FAILURES} failures in attempts without a '
                f'newer checkpoint ({cause})'
            )
            self._exclude({host})
        start = time.monotonic()
        while not have_answered and (silent := self.silent(self.placement.hosts)):
            waited_s = time.monotonic() - start
            if self.signals.is_requested:
                return True
            can_exclude = self.options.elastic and len(silent) < len(self.placement.hosts)
            limit_s = ELASTIC_LIMIT_S if can_exclude else _WAIT_LIMIT_S
            if waited_s < limit_s:
                self.signals.pause(_RETRY_S)
                continue
            names = names_of(silent)
            if not can_exclude:
                self._ask_absent()
                if self._returned:
                    self._take_back()
                    continue
                self.say(f'{names} did not answer for {limit_s:.0f} s; not restarted')
                return False
            self.say(f'excluding {names}, which did not answer for {limit_s:.0f} s')
            self._num_relapses.update(self._on_trial.intersection(silent))
            self._exclude(silent)
            self._absent += [h for h in silent if self._num_relapses[h] < attempts.MAX_FAILURES]
            return True
        return True

    def _bad_hosts(self) -> dict[str, str]:
        """Return the hosts to exclude and their last causes, from the failures since the newest
        checkpoint."""
        if not (self.options.elastic and self.options.hosts):
            return {}
        failures = []
        for failure in read_failures(self.placement.run_dir):
            job = failure.job.removesuffix(_DOCTOR)
            if placement := self._placements.get(job):  # with the host names that the user gave
                failures.append(replace(failure, job=job, host=placement.host_at_fault(failure)))
        return attempts.bad_hosts(failures, self.placement.hosts)

    def _exclude(self, hosts: Collection[str]) -> None:
        left = (h for h in self.placement.hosts if h not in hosts)
        self.placement = replace(self.placement, hosts=tuple(left))
        self._on_trial = self._on_trial.difference(hosts)

    def _find_returned(self) -> bool:
        """Return whether to stop the ranks, because excluded hosts answer again.

        The stop request itself writes a checkpoint, so no step is lost. To wait for the next
        regular one would only train longer on fewer hosts.
        """
        if self._absent:
            self._returned = self.returned(self._absent)
        if self._returned:
            self.say(
                f'stopping at a checkpoint to take back {names_of(self._returned)}, which answered '
                'twice'
            )
        return bool(self._returned)

    def _ask_absent(self) -> None:
        """Note which of the excluded hosts answer now."""
        if self._absent:
            self._returned = set(self._absent).difference(self.silent(self._absent))

    def _suspects(self, silent: Collection[str]) -> set[str]:
        """Return the hosts taken back for an attempt that may have ended it: none if only others
        are silent, or if no host would be left."""
        suspects = self._on_trial.intersection(silent) if silent else self._on_trial
        return suspects if suspects < set(self.placement.hosts) else set()

    def _take_back(self) -> None:
        """Add the hosts that have returned, in the order in which the user gave all hosts."""
        self._on_trial, self._returned = self._returned, set()
        self._absent = [host for host in self._absent if host not in self._on_trial]
        present = self._on_trial.union(self.placement.hosts)
        hosts = filter(present.__contains__, self._all_hosts)
        self.placement = replace(self.placement, hosts=tuple(hosts))


def names_of(hosts: Collection[str]) -> str:
    return ' '.join(sorted(hosts))
