"""How the pods of a job find together: all of one generation, or none.

Pod 0 keeps the door. Every pod reports there every few seconds; when all are there they are let in together, with what
their ranks need to meet. A pod that falls silent, is replaced or loses a rank ends the generation for all: a pod that
comes later belongs to the next one, whose door is another process.
"""
import http.client
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from mlperf_rn50.errors import EXIT_OK, EXIT_RESUMABLE
from mlperf_rn50.system.meeting import Handler, Server, ask

# A pod that has not been heard for so long is lost.
LOST_S = 20.0
REPORT_PERIOD_S = 2.0
_PATH = '/pod'
_ORDERLY = (EXIT_OK, EXIT_RESUMABLE)


@dataclass(frozen=True)
class Report:
    """What a pod says of itself.

    Args:
        index: its number in the job, from 0.
        pod: its own random name: a pod that replaced another has the same index and another name.
        generation: the one it was let in with; '' before.
        code: the worst exit code of its ranks once they have ended, None before.
    """

    index: int
    pod: str
    generation: str = ''
    code: int | None = None


@dataclass(frozen=True)
class Orders:
    """What the ranks of a generation need: port and secret of their store, and the run they go on with, None for none.
    """

    port: int
    secret: str
    resume: int | None


@dataclass(frozen=True)
class Answer:
    """What the door says: the generation, whether to wait, run or end, why, and when to run the orders."""

    generation: str
    state: str
    why: str = ''
    orders: Orders | None = None


@dataclass
class _Pod:
    name: str
    address: str
    heard_s: float
    code: int | None = None


class Gathering:
    """The pods of one generation, as pod 0 knows them. Times are of one clock, in seconds."""

    def __init__(self, num_pods: int):
        self.generation = secrets.token_hex(8)
        self._num_pods, self._pods = num_pods, dict[int, _Pod]()
        self._is_complete, self._why_over = False, ''
        self._orders: Orders | None = None
        self._lock = threading.Lock()

    def report(self, report: Report, address: str, now: float) -> Answer:
        """Takes in what a pod says, from an address; what it is to do."""
        with self._lock:
            self._look(now)
            if report.generation not in ('', self.generation):
                return Answer(self.generation, 'over', 'another generation is gathering')
            if not 0 <= report.index < self._num_pods:
                return Answer(self.generation, 'over', f'got pod {report.index}, expected 0 to {self._num_pods - 1}')
            known = self._pods.get(report.index)
            if not self._is_complete:
                self._pods[report.index] = _Pod(report.pod, address, now)
                self._is_complete = len(self._pods) == self._num_pods
            elif known and known.name == report.pod:
                self._hear(known, report, now)
            else:
                if known and known.code is None:
                    self._end(f'pod {report.index} was replaced')
                return Answer(self.generation, 'over', 'this generation runs without this pod')
            return self._answer()

    def _hear(self, pod: _Pod, report: Report, now: float) -> None:
        pod.heard_s = now
        if report.code is not None:
            pod.code = report.code
            if report.code not in _ORDERLY:
                self._end(f'a rank of pod {report.index} ended with exit code {report.code}')

    def look(self, now: float) -> Answer:
        """What pod 0 is to do, as time goes by."""
        with self._lock:
            self._look(now)
            return self._answer()

    def _look(self, now: float) -> None:
        silent = [i for i, p in self._pods.items() if p.code is None and now - p.heard_s > LOST_S]
        if not self._is_complete:
            for index in silent:
                del self._pods[index]
        elif silent:
            self._end(f'pod {silent[0]} has been silent for {LOST_S:.0f} s')

    def _end(self, why: str) -> None:
        self._why_over = self._why_over or why

    def _answer(self) -> Answer:
        if self._why_over:
            return Answer(self.generation, 'over', self._why_over)
        if self._orders:
            return Answer(self.generation, 'run', '', self._orders)
        missing = [str(i) for i in range(self._num_pods) if i not in self._pods]
        return Answer(self.generation, 'wait', f'pod {", ".join(missing)} is not there' if missing else 'all are there')

    @property
    def is_complete(self) -> bool:
        """Whether all were there at once."""
        return self._is_complete

    @property
    def first_address(self) -> str | None:
        """Of another pod than 0; None where there is none."""
        return next((p.address for i, p in self._pods.items() if i), None)

    def let_in(self, orders: Orders) -> None:
        """From now on the pods are told to run."""
        with self._lock:
            self._orders = orders

    def is_left(self, now: float) -> bool:
        """Whether the ranks of every pod but 0 have ended, or nothing is heard of it."""
        return all(p.code is not None or now - p.heard_s > 3 * REPORT_PERIOD_S for i, p in self._pods.items() if i)


class Door(Server):
    """The door of a gathering, as a server."""

    def __init__(self, gathering: Gathering, secret: str, port: int, is_local: bool):
        super().__init__(_DoorHandler, secret, port, is_local)
        self.gathering = gathering


class _DoorHandler(Handler):
    server: Door

    def do_PUT(self) -> None:
        try:
            report = parse_report(self.body)
        except (ValueError, TypeError):
            self.answer(400)
            return
        answer = self.server.gathering.report(report, self.client_address[0].removeprefix('::ffff:'), time.monotonic())
        self.answer(200, json.dumps(asdict(answer)).encode())


def parse_report(body: bytes) -> Report:
    """Raises ValueError or TypeError for anything else."""
    report = Report(**json.loads(body))
    if not (type(report.index) is int and isinstance(report.pod, str) and isinstance(report.generation, str)
            and (report.code is None or type(report.code) is int)):
        raise ValueError('not a report')
    return report


def report_to(address: str, port: int, secret: str) -> Callable[[Report], Answer | None]:
    """How another pod than 0 reports; its answer is None where the door does not."""
    def report(said: Report) -> Answer | None:
        try:
            status, body = ask(address, port, 'PUT', _PATH, secret, json.dumps(asdict(said)).encode(), timeout_s=3)
            answer = Answer(**json.loads(body)) if status == 200 else None
            return answer and Answer(answer.generation, answer.state, answer.why, _parse_orders(answer.orders))
        except (OSError, http.client.HTTPException, ValueError, TypeError):
            return None
    return report


def _parse_orders(orders) -> Orders | None:
    return Orders(**orders) if orders else None
