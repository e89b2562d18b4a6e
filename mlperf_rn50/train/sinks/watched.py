"""Sinks for the watcher of this rank and the telemetry of its node."""

from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train import events
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
