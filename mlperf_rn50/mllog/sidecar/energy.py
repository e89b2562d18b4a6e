"""Energy of a run from the telemetry of its nodes, which is untrusted input like the log.

It excludes gaps before resumes, and counts repeated training once. Every node must have samples for
the whole run.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.sidecar.node_telemetry import TelemetryFiles, files_of
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import host_of
from mlperf_rn50.runfolder.records import TelemetryRecord
from mlperf_rn50.text import plural

KINDS = ('cpu', 'gpu')
# Expected reasons for missing energy.
NO_TELEMETRY, NO_COUNTERS = 'no telemetry of the run', 'no node has readable counters'
_MAX_DEVICES, _MAX_DEVICE_W, MAX_READINGS = 64, 1e4, 10_000_000
# Maximum seconds from the start or end of a part of the run to the nearest sample; minimum share
# covered by samples.
_MAX_GAP_S, _MIN_SHARE = 3.0, 0.9
_MAX_START_S = 0.1  # of the first sample after run_start, at which a meter is read too

Readings = list[tuple[float, float]]  # (seconds on the node's clock, joules), in order of the file
Devices = dict[str, float]  # joules by device name


@dataclass(frozen=True)
class Energy:
    """Energy of the devices in a run's nodes; None if it was not measured."""

    seconds: float  # on the run's clock
    cpu_joules: float | None = None  # energy of all CPU packages in all nodes
    gpu_joules: float | None = None  # energy of all GPUs in all nodes, used or not
    reasons: Mapping[str, str] = field(default_factory=dict)  # why energy is missing, by kind
    nodes: Mapping[str, Mapping[str, Devices]] = field(default_factory=dict)  # by host and kind

    @property
    def measured(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if getattr(self, f'{kind}_joules') is not None)

    @property
    def joules(self) -> float | None:
        """Sum over the measured kinds, or None if there are none."""
        known = [j for j in (self.cpu_joules, self.gpu_joules) if j is not None]
        return sum(known) if known else None


class _Unmeasured(Exception):
    """The energy cannot be computed; read_energy reports the message as the reason."""


class _Session:
    """The samples of one training process on a node, from its start to its end."""

    def __init__(self) -> None:
        self.readings: dict[str, dict[str, Readings]] = {}
        # time of run_start on the node's clock, and on the run's clock
        self.start: tuple[float, float] | None = None
        self.last_s = 0.0

    def add(self, record: TelemetryRecord) -> None:
        if record.event == 'run_start' and self.start is None and record.clock_s is not None:
            self.start = record.time_s, record.clock_s
        for kind in record.energy_j.keys() & set(KINDS):
            self.last_s = record.time_s
            known = self.readings.setdefault(kind, {})
            for name, joules in record.energy_j[kind].items():
                if name in known or len(known) < _MAX_DEVICES:
                    known.setdefault(name, []).append((record.time_s, joules))


class _Node(NamedTuple):
    host: str
    boot: str | None
    kinds: set[str]  # kinds of energy measured in any session
    sessions: list[_Session]  # those with a run_start, in order


def _read_node(path: Path, most: int) -> _Node:
    """Return the readings of a node; raise _Unmeasured above `most` readings and samples."""
    sessions, boot = [_Session()], None
    for _, record in read_lines(path, TelemetryRecord):
        most -= 1 + sum(map(len, record.energy_j.values()))
        if most < 0:
            raise _Unmeasured(f'more than {MAX_READINGS:,} readings of all nodes')
        if record.event == 'start':
            sessions.append(_Session())
        boot = record.boot or boot
        sessions[-1].add(record)
    kinds = {kind for s in sessions for kind in s.readings}
    return _Node(host_of(path), boot, kinds, [s for s in sessions if s.start])


def _joules_at(readings: Readings, time_s: float) -> float:
    """Interpolate joules at a time between the first and the last reading."""
    place = bisect.bisect_left(readings, time_s, key=itemgetter(0))
    after_s, after = readings[place]
    if place == 0 or after_s == time_s:
        return after
    before_s, before = readings[place - 1]
    return before + (after - before) * (time_s - before_s) / (after_s - before_s)


def _joules_between(readings: Readings, start_s: float, stop_s: float) -> float:
    """Return the joules between two times, extrapolated beyond the readings. Raise _Unmeasured if
    these are too few."""
    for time_s, name in ((start_s, 'start'), (stop_s, 'end')):
        place = bisect.bisect_left(readings, time_s, key=itemgetter(0))
        gap_s = min(abs(t - time_s) for t, _ in readings[max(0, place - 1) : place + 1])
        if gap_s > _MAX_GAP_S:
            raise _Unmeasured(
                f'the nearest sample is {gap_s:.1f} s from the {name}, expected at most '
                f'{_MAX_GAP_S:g} s'
            )
    first_s, last_s = max(start_s, readings[0][0]), min(stop_s, readings[-1][0])
    covered_s, whole_s = last_s - first_s, stop_s - start_s
    if covered_s < _MIN_SHARE * whole_s:
        raise _Unmeasured(f'the samples cover {max(0.0, covered_s):.1f} s of {whole_s:.1f} s')
    joules = _joules_at(readings, last_s) - _joules_at(readings, first_s)
    watts = joules / covered_s
    if watts > _MAX_DEVICE_W:
        raise _Unmeasured(f'got {watts:,.0f} W, expected at most {_MAX_DEVICE_W:,.0f} W')
    return joules * whole_s / covered_s


def _device_joules(parts: Sequence[tuple[_Session, float, float]], kind: str, name: str) -> float:
    total = 0.0
    for session, start_s, stop_s in parts:
        readings = session.readings[kind].get(name)
        if not readings or not session.start:
            raise _Unmeasured('missing in a part of the run')
        for (before_s, before), (after_s, after) in zip(readings, readings[1:]):
            if after_s < before_s:
                raise _Unmeasured('the sample times decrease')
            if after < before:
                raise _Unmeasured('the counter decreases')
        zero_s = session.start[0] - session.start[1]
        total += _joules_between(readings, zero_s + start_s, zero_s + stop_s)
    if not total:
        raise _Unmeasured('the counter does not change')
    return total


def _node_joules(node: _Node, kind: str, until_s: float) -> Devices:
    starts = [s.start[1] for s in node.sessions if s.start]
    # repeated training counts once
    stops = [min([until_s, *starts[i + 1 :]]) for i in range(len(starts))]
    parts = [part for part in zip(node.sessions, starts, stops) if part[2] > part[1]]
    if not parts or parts[0][1] > _MAX_START_S:
        raise _Unmeasured(f'{node.host} has no samples from the start of the run')
    if any(not s.readings.get(kind) for s, _, _ in parts):
        raise _Unmeasured(f'{node.host} has no readable counters')
    joules = {}
    for name in dict.fromkeys(n for s, _, _ in parts for n in s.readings[kind]):
        try:
            joules[name] = _device_joules(parts, kind, name)
        except _Unmeasured as e:
            raise _Unmeasured(f'{node.host}, {kind} {name}: {e}') from e
    return joules


def _last_s(node: _Node) -> float:
    """Return the time of a node's last reading on the clock of the run, in seconds."""
    last = node.sessions[-1] if node.sessions else None
    return last.last_s - last.start[0] + last.start[1] if last and last.start else 0.0


def _check_nodes(run: Run, nodes: Sequence[_Node], kind: str) -> None:
    """Raise _Unmeasured unless the sampled nodes match the nodes of the run."""
    if not nodes:
        raise _Unmeasured(NO_TELEMETRY)
    if not any(kind in n.kinds for n in nodes):
        raise _Unmeasured(NO_COUNTERS)
    if run.num_nodes != len(nodes):
        raise _Unmeasured(
            f'telemetry of {plural(len(nodes), "node")}, but {run.num_nodes or "no number"} in '
            'the log'
        )
    boots: dict[str, str] = {}
    for node in nodes:
        if node.boot and boots.setdefault(node.boot, node.host) != node.host:
            raise _Unmeasured(
                f'{boots[node.boot]} and {node.host} are the same machine, which would count twice'
            )


def read_energy(run: Run, files: TelemetryFiles = None) -> Energy:
    """Return the energy to the run's end or, without one, the last time sampled by all nodes.
    files: see files_of."""
    paths = files_of(run, files)
    share = MAX_READINGS // max(1, len(paths))
    seconds = run.time_to_train_s if run.elapsed is None else run.elapsed.training_preserved_s
    try:
        nodes = [_read_node(path, share) for path in paths]
    except _Unmeasured as e:
        return Energy(seconds or 0.0, reasons=dict.fromkeys(KINDS, str(e)))
    if seconds is None:
        seconds = max(0.0, min(map(_last_s, nodes), default=0.0))
    measured, reasons = {}, {}
    for kind in KINDS:
        try:
            _check_nodes(run, nodes, kind)
            measured[kind] = {n.host: _node_joules(n, kind, seconds) for n in nodes}
        except _Unmeasured as e:
            reasons[kind] = str(e)
    joules = {
        f'{kind}_joules': sum(j for devices in hosts.values() for j in devices.values())
        for kind, hosts in measured.items()
    }
    by_node: dict[str, dict[str, Devices]] = {}
    for kind, hosts in measured.items():
        for host, devices in hosts.items():
            by_node.setdefault(host, {})[kind] = devices
    return Energy(seconds, **joules, reasons=reasons, nodes=by_node)
