"""Trains in the pods of an Indexed Job of Kubernetes, without an operator, MPI or ssh: every pod runs this.

Exit codes, for the job's podFailurePolicy: 0 the target is reached; 1 the run has failed; 2 a mistake in what was asked
for; 75 to be started again, which goes on from the newest checkpoint.
"""
import argparse
import errno
import os
import pwd
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE, ConfigError, UserError
from mlperf_rn50.launch.attempts import MAX_STUCK
from mlperf_rn50.launch.pod_door import (
    LOST_S,
    REPORT_PERIOD_S,
    Answer,
    Door,
    Gathering,
    Orders,
    Report,
    report_to,
)
from mlperf_rn50.launch.pod_progress import (
    Attempt,
    exit_code,
    finished_code,
    newest_checkpoint,
    plan_attempt,
    pod_code,
    run_ends,
    write_attempt,
)
from mlperf_rn50.system.addresses import LOOPBACK, address_towards, resolve
from mlperf_rn50.system.meeting import SECRET_VARIABLE, Server, StoreHandler, knows, prove
from mlperf_rn50.system.rendezvous import RENDEZVOUS_VARIABLE, place_variables
from mlperf_rn50.train.run_folder import RunFolder

HERE = Path(__file__).parents[2]
PROGRAM = HERE / '.venv/bin/mlperf-rn50'
_POLL_S = 0.2
_ASK_PERIOD_S = 0.5
# Ranks that have to end are given so long to say why, and to write what they are writing.
_LAST_WORDS_S = 15.0
_SAY_PERIOD_S = 30.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

Tell = Callable[[int | None], Answer | None]


@dataclass(frozen=True)
class Settings:
    """What Kubernetes and the manifest say of a pod.

    Args:
        index: of the pod, from 0.
        num_pods: of the job.
        ranks_per_node: ranks of each pod.
        meeting: name of pod 0.
        port: of its door.
        secret: of the job.
        start_limit_s: how long to wait for the other pods.
    """

    index: int
    num_pods: int
    ranks_per_node: int
    meeting: str
    port: int
    secret: str
    start_limit_s: int

    @property
    def job(self) -> str:
        """A name of the job that says nothing of its secret."""
        return prove(self.secret, '/job')[:16]


def parse_settings(env: Mapping[str, str]) -> Settings:
    """Raises ConfigError for a variable that is missing or no number."""
    num_pods = _count(env, 'MLPERF_RN50_NODES', 1, 100_000)
    settings = Settings(
        _count(env, 'JOB_COMPLETION_INDEX', 0, num_pods - 1), num_pods,
        _count(env, 'MLPERF_RN50_RANKS_PER_NODE', 1, 1024), env.get('MLPERF_RN50_MEETING', ''),
        _count(env, 'MLPERF_RN50_MEETING_PORT', 1, 65535, 29400), env.get(SECRET_VARIABLE, ''),
        _count(env, 'MLPERF_RN50_START_LIMIT_S', 1, 10**6, 900))
    if len(settings.secret) < 16:
        raise ConfigError(f'{SECRET_VARIABLE}: got {len(settings.secret)} characters, expected 16 or more, from a '
                          'Secret: openssl rand -hex 32')
    if num_pods > 1 and not settings.meeting:
        raise ConfigError('MLPERF_RN50_MEETING: got nothing, expected the name of pod 0, JOB-0.SERVICE')
    return settings


def _count(env: Mapping[str, str], name: str, low: int, high: int, default: int | None = None) -> int:
    text = env.get(name) or ('' if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise ConfigError(f'{name}: got {text or "nothing"}, expected a number from {low} to {high}')
    return int(text)


def user_variables(env: Mapping[str, str], uid: int, is_known: bool, is_writable: Callable[[str], bool],
                   spare: str) -> dict[str, str]:
    """What libraries ask of the user, for one that no passwd entry names and whose home is the root folder.

    Args:
        env: the environment.
        uid: of the user.
        is_known: whether there is a passwd entry.
        is_writable: of a folder.
        spare: a folder that can be written.
    """
    found: dict[str, str] = {}
    if not is_known and not env.get('USER'):
        found.update(USER=f'uid{uid}', LOGNAME=f'uid{uid}')
    if not env.get('HOME') or not is_writable(env['HOME']):
        found['HOME'] = spare
    if not is_writable(env.get('TMPDIR') or '/tmp'):
        found['TMPDIR'] = spare
    return found


def _own_user_variables() -> dict[str, str]:
    def is_writable(folder: str) -> bool:
        return os.access(folder, os.W_OK | os.X_OK)
    try:
        is_known = bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        is_known = False
    spare = next((f for f in (os.environ.get('TMPDIR', ''), '/tmp', '/dev/shm') if f and is_writable(f)),
                 tempfile.gettempdir())
    return user_variables(os.environ, os.getuid(), is_known, is_writable, spare)


def say(text: str) -> None:
    """A line for people."""
    print(f'launch/pod.sh: {text}', file=sys.stderr, flush=True)


class StopRequest:
    """Whether Kubernetes, or a person, has asked the pod to go."""

    def __init__(self) -> None:
        self.is_set = False
        for number in _STOPS:  # the first process of a container is deaf to what it does not handle
            signal.signal(number, self._set)

    def _set(self, *_) -> None:
        self.is_set = True


class Ranks:
    """The ranks of this pod: its children, and whatever else is left to the first process of a container."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}

    def start(self, local_rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts a rank. Asked to stop before it listens, it hears of that when it does."""
        pid = os.posix_spawn(command[0], list(command), dict(env), setsigmask=[signal.SIGTERM, signal.SIGUSR1])
        self._pids[pid] = local_rank

    def reap(self) -> None:
        """Takes in what has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._pids:
                self.codes[self._pids.pop(pid)] = os.waitstatus_to_exitcode(status)

    @property
    def have_ended(self) -> bool:
        """Whether all ranks have."""
        return not self._pids

    @property
    def is_one_lost(self) -> bool:
        """Whether one has ended in disorder."""
        return any(code not in (EXIT_OK, EXIT_RESUMABLE) for code in self.codes.values())

    def send(self, number: int) -> None:
        """Sends a signal to those that are left."""
        for pid in self._pids:  # not reaped yet, so the number is still theirs
            os.kill(pid, number)


def watch(ranks: Ranks, tell: Tell, stop: StopRequest) -> str:
    """Waits until the ranks of this pod have ended; why they had to, '' where they did so by themselves.

    They have to as soon as one is lost, here or elsewhere.
    """
    why, told, heard = '', 0.0, time.monotonic()
    ended, is_asked = None, False
    while True:
        ranks.reap()
        if ranks.have_ended:
            return why
        now = time.monotonic()
        if ranks.is_one_lost:
            why = why or 'a rank was lost'
        if now - told >= REPORT_PERIOD_S or ranks.is_one_lost and ended is None:
            answer = tell(pod_code([*ranks.codes.values()]) if ranks.is_one_lost else None)
            told, heard = now, time.monotonic() if answer else heard
            why = why or _why_over(answer, now - heard)
        if why and ended is None:
            say(f'ending the ranks of this pod: {why}')
            ended = now
        if (why or stop.is_set) and not is_asked:
            ranks.send(signal.SIGTERM)
            is_asked = True
        if ended is not None and now - ended > _LAST_WORDS_S:
            ranks.send(signal.SIGKILL)
        time.sleep(_POLL_S)


def _why_over(answer: Answer | None, silent_s: float) -> str:
    """Why a pod that runs has to end, '' where it has not."""
    if answer:
        return answer.why if answer.state == 'over' else ''
    return f'pod 0 has been silent for {LOST_S:.0f} s' if silent_s > LOST_S else ''


def rank_environment(env: Mapping[str, str], settings: Settings, local_rank: int, address: str,
                     orders: Orders) -> dict[str, str]:
    """The environment of a rank: who it is and where it meets the others. The job's secret is not in it."""
    node, per_node = settings.index, settings.ranks_per_node
    return {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1', **env, RENDEZVOUS_VARIABLE: f'{address}:{orders.port}',
            SECRET_VARIABLE: orders.secret,
            **place_variables(node * per_node + local_rank, settings.num_pods * per_node, local_rank, per_node, node,
                              settings.num_pods)}


class Pod:
    """One pod of the job, from its start to its end."""

    def __init__(self, settings: Settings, new_words: Sequence[str], words: Sequence[str], run_dir: Path,
                 stop: StopRequest):
        """new_words start a new run, words are for a resumed one, too."""
        self._settings, self._new_words, self._words = settings, new_words, words
        self._run_dir, self._stop = run_dir, stop
        self._name, self._generation = secrets.token_hex(8), ''
        self._ranks = Ranks()

    def report(self, code: int | None = None) -> Report:
        """What the pod says of itself now."""
        return Report(self._settings.index, self._name, self._generation, code)

    def await_orders(self, try_once: Callable[[], Answer | str | int]) -> Answer | int:
        """Waits for the other pods; the answer that lets this one in, or the exit code it ends with.

        Args:
            try_once: asks the door: its answer, or why there is none, or the exit code to end with.
        """
        deadline, said = time.monotonic() + self._settings.start_limit_s, time.monotonic()
        while not self._stop.is_set:
            answer = try_once()
            if isinstance(answer, int):
                return answer
            if isinstance(answer, Answer) and answer.state == 'run':
                self._generation = answer.generation
                return answer
            now, why = time.monotonic(), answer.why if isinstance(answer, Answer) else answer
            if now > deadline:
                say(f'gave up after {self._settings.start_limit_s} s (MLPERF_RN50_START_LIMIT_S): {why}')
                return EXIT_USAGE if answer == _STRANGER else EXIT_RESUMABLE
            if now - said > _SAY_PERIOD_S:
                say(f'waiting: {why}')
                said = now
                code = finished_code(self._run_dir, self._settings.job)
                if code is not None:
                    return code
            time.sleep(_ASK_PERIOD_S)
        say('asked to stop before the ranks were started')
        return EXIT_RESUMABLE

    def run_ranks(self, address: str, orders: Orders, tell: Tell) -> list[int]:
        """Starts the ranks and waits for their end; their exit codes."""
        settings = self._settings
        how = self._new_words
        if orders.resume is not None:
            how = ['--resume', str(RunFolder(self._run_dir, orders.resume).checkpoints)]
        say(f'generation {self._generation}: {" ".join(how)}')
        command = [str(HERE / 'launch/bind.sh'), str(PROGRAM), 'train', *how, *self._words, '--run.num_nodes',
                   str(settings.num_pods), '--run.ranks_per_node', str(settings.ranks_per_node)]
        for local_rank in range(settings.ranks_per_node):
            self._ranks.start(local_rank, command, rank_environment(os.environ, settings, local_rank, address, orders))
        watch(self._ranks, tell, self._stop)
        codes = [code for _, code in sorted(self._ranks.codes.items())]
        tell(pod_code(codes))
        return codes

    def join(self) -> int:
        """The life of a pod other than 0; its exit code."""
        settings = self._settings
        address = ''

        def try_once() -> Answer | str:
            nonlocal address
            found = {a: knows(a, settings.port, settings.secret) for a in resolve(settings.meeting)}
            if not found:
                return f'{settings.meeting} has no address yet'
            address = next((a for a, is_it in found.items() if is_it), '')
            if not address:
                return _STRANGER if False in found.values() else f'pod 0 does not answer at {settings.meeting}'
            answer = report_to(address, settings.port, settings.secret)(self.report())
            return answer or f'pod 0 does not answer at {settings.meeting}'
        answer = self.await_orders(try_once)
        if isinstance(answer, int):
            return answer
        assert answer.orders
        door = report_to(address, settings.port, settings.secret)
        codes = self.run_ranks(address, answer.orders, lambda code: door(self.report(code)))
        return exit_code(settings.index, codes, None, self._stop.is_set, 0)

    def lead(self) -> int:
        """The life of pod 0, which keeps the door and judges the job; its exit code."""
        settings = self._settings
        is_alone = settings.num_pods == 1
        gathering = Gathering(settings.num_pods)
        Door(gathering, settings.secret, settings.port, is_alone).start()

        def tell(code: int | None = None) -> Answer:
            return gathering.report(self.report(code), LOOPBACK, time.monotonic())
        attempt: Attempt | None = None

        def try_once() -> Answer | int:
            nonlocal attempt
            answer = tell()
            if gathering.is_complete and attempt is None:
                attempt, resume = plan_attempt(self._run_dir, settings.job)
                if attempt.number > MAX_STUCK:
                    return self._give_up(attempt)
                write_attempt(self._run_dir, attempt)
                store = Server(StoreHandler, secrets.token_hex(32), is_local=is_alone)
                store.start()
                gathering.let_in(Orders(store.port, store.secret, resume))
            return EXIT_RESUMABLE if answer.state == 'over' else answer
        answer = self.await_orders(try_once)
        if isinstance(answer, int):
            return answer
        assert answer.orders and attempt
        run = RunFolder(self._run_dir, attempt.run)
        num_ends = len(run_ends(run))
        address = address_towards(gathering.first_address or LOOPBACK) or LOOPBACK
        codes = self.run_ranks(address, answer.orders, tell)
        end = next(iter(run_ends(run)[num_ends:][-1:]), None)
        is_stuck = newest_checkpoint(self._run_dir) <= attempt.newest
        if self._stop.is_set or end == 'interrupted':  # which says nothing of the next attempt
            write_attempt(self._run_dir, replace(attempt, number=attempt.number - 1))
        self._await_others(gathering)
        code = exit_code(0, codes, end, self._stop.is_set, attempt.number if is_stuck else 0)
        if code == EXIT_FAILED and end is None:
            return self._give_up(attempt)
        say(f'the run ended: {end or "cut short"}; exit code {code}')
        return code

    def _give_up(self, attempt: Attempt) -> int:
        """The job has failed; the next one with this secret has all its attempts again."""
        say(f'{MAX_STUCK} attempts without a newer checkpoint: this job does not get on')
        write_attempt(self._run_dir, replace(attempt, number=0))
        return EXIT_FAILED

    def _await_others(self, gathering: Gathering) -> None:
        """Their ranks may still need the store to take their leave."""
        deadline = time.monotonic() + LOST_S
        while not gathering.is_left(time.monotonic()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


_STRANGER = f'who answers at MLPERF_RN50_MEETING has another {SECRET_VARIABLE}'


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('launch/pod.sh', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog='Everything else is an option of: mlperf-rn50 train')
    parser.add_argument('--config', metavar='FILE', required=True, help='the configuration of the run')
    parser.add_argument('--run-dir', metavar='DIR', help='where its files go: a folder that all pods share')
    return parser


def _find_run_dir(words: Sequence[str]) -> Path | int:
    """run.dir of the configuration, which is checked before anything starts; or the exit code of a mistake."""
    done = subprocess.run([PROGRAM, 'train', *words, '--print', 'run.dir'], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return EXIT_RESUMABLE if done.returncode < 0 else done.returncode
    return Path(done.stdout.strip())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a pod; returns its exit code."""
    options, words = _parser().parse_known_args(argv)
    stop = StopRequest()
    try:
        settings = parse_settings(os.environ)
        os.environ.update(_own_user_variables())
        new_words = ['--config', options.config, *(['--run.dir', options.run_dir] if options.run_dir else [])]
        run_dir = _find_run_dir([*new_words, *words])
        if isinstance(run_dir, int):
            return run_dir
        code = finished_code(run_dir, settings.job)
        if code is not None:
            say(f'the run of this job in {run_dir} has ended; exit code {code}')
            return code
        pod = Pod(settings, new_words, words, run_dir, stop)
        return pod.lead() if settings.index == 0 else pod.join()
    except UserError as e:
        say(str(e))
        return e.exit_code
    except (FileNotFoundError, PermissionError) as e:
        say(f'{e.filename}: {e.strerror}')
        return EXIT_USAGE
    except OSError as e:  # a network may come back, a disk does not become larger by itself
        say(str(e))
        return EXIT_FAILED if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) else EXIT_RESUMABLE


if __name__ == '__main__':
    sys.exit(main())
