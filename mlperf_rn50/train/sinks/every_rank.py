"""Sinks of every rank: for its watcher, the telemetry of its node, and the traces of its steps."""

import threading
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.files import write_atomically
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.system.launcher_env import print_stderr, rank_name
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


class Watched:
    """Sink that turns events into signs of life for the watcher."""

    def __init__(self, heartbeat: Heartbeat):
        self._heartbeat = heartbeat

    def handle(self, event: events.Event) -> None:
        match event:
            case events.StepDone():
                self._heartbeat.beat('training', event.step)
            # the first step may wait until rank 0 has written a checkpoint
            case events.EpochStarted():
                is_written = self._heartbeat.phase != 'writing a checkpoint'
                self._heartbeat.beat('training' if is_written else None, event.first_step)
            case events.EvalStarted():
                self._heartbeat.beat('evaluation')
            case events.Saving() | events.Ended():
                self._heartbeat.beat('writing a checkpoint')
            case _:
                self._heartbeat.beat()

    def close(self) -> None:
        pass


class Sampled:
    """Sink that gives this node's telemetry the run's clock and raises the telemetry's errors."""

    def __init__(self, telemetry: Telemetry):
        self._telemetry = telemetry

    def handle(self, event: events.Event) -> None:
        self._telemetry.check()
        match event:
            case events.RunStarted():
                self._telemetry.run_start(0.0)
            case events.Resumed():
                self._telemetry.run_start(event.clock_s, event.elapsed_s)

    def close(self) -> None:
        self._telemetry.close()


class TraceFile:
    """Sink that writes the traced steps of this rank, each time instead of earlier ones."""

    def __init__(self, path: Path):
        self._path = path

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.StepsTraced):  # in a thread, because storage may be slow
            threading.Thread(target=self._write, args=(event.spans,)).start()

    def _write(self, spans: Sequence[StepSpans]) -> None:
        try:
            # the run folder may be on a local disk of each node
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, ''.join(f'{encode(s)}\n' for s in spans))
        except OSError as e:  # does not end the run
            place = f'{rank_name()}: {self._path}'
            print_stderr(f'mlperf-rn50: {place}: {e.strerror}; the trace is not written')

    def close(self) -> None:
        pass
