"""From a log file of this program to a Run."""
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlperf_logging.mllog import constants as keys

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf import events
from mlperf_rn50.mlperf.events import Event, decode_line

RunStatus = Literal['converged', 'aborted', 'interrupted', 'failed']


@dataclass(frozen=True)
class Run:
    """One run, as its log tells it; None where the log does not say.

    Args:
        path: the log.
        status: converged; aborted, where the epochs were used up; interrupted, where it was asked to stop; failed,
            where the log ends without run_stop or the run gave up.
        evaluations: (epoch from 1, Top-1 as a fraction) in their order.
        epochs_to_converge: epochs trained when the target was reached.
        time_to_train_s: from run_start to run_stop, without the gaps of resumes.
    """

    path: Path
    status: RunStatus
    dataset: str | None
    is_imagenet: bool
    platform: str | None
    num_nodes: int | None
    num_ranks: int | None
    global_batch_size: int | None
    base_lr: float | None
    seed: int | None
    target_accuracy: float | None
    evaluations: tuple[tuple[int, float], ...]
    epochs_to_converge: int | None
    time_to_train_s: float | None
    num_resumes: int


def _clock_s(found: list[Event]) -> float | None:
    """Seconds on the run's clock at its end; None for a run without run_start and run_stop."""
    start, before_s, last = None, 0.0, None
    for event in found:
        if event.key == keys.RUN_START:
            start = event.time_s
        elif event.key == events.RUN_RESUMED:
            start, before_s, last = event.time_s, float(event.metadata.get('clock_s', 0)), None
        elif event.key == keys.RUN_STOP and start is not None:
            last = before_s + event.time_s - start
    return last


def _status(found: list[Event]) -> RunStatus:
    ends = [e for e in found if e.key in (keys.RUN_STOP, events.RUN_RESUMED)]
    if not ends or ends[-1].key != keys.RUN_STOP:
        return 'failed'
    if ends[-1].metadata.get('status') == keys.SUCCESS:
        return 'converged'
    reason = ends[-1].metadata.get('reason')
    return reason if reason in ('interrupted', 'failed') else 'aborted'


def _events(path: Path) -> Iterable[Event]:
    try:
        with open(path, errors='replace') as f:
            for line in f:
                try:
                    event = decode_line(line)
                except ValueError:  # a torn line, as a killed run leaves
                    continue
                if event and event.line_format == 'MLLOG':
                    yield event
    except OSError as e:
        raise UserError(f'{path}: cannot read the log: {e.strerror}') from e


def read_run(path: Path) -> Run:
    """The run of a log file.

    Raises:
        UserError: the file cannot be read or holds no line of an MLPerf log.
    """
    found = list(_events(path))
    if not found:
        raise UserError(f'{path}: no :::MLLOG line in it; expected a result_<k>.txt of this program')
    last: dict[str, Event] = {e.key: e for e in found}

    def value(key: str, kind: type) -> Any:
        v = last[key].value if key in last else None
        return v if isinstance(v, kind) else None
    evaluations = tuple((int(e.metadata.get('epoch_num', 0)), float(e.value)) for e in found
                        if e.key == keys.EVAL_ACCURACY)
    status = _status(found)
    resumed = last[events.RUN_RESUMED].metadata if events.RUN_RESUMED in last else {}
    dataset = last.get(events.DATASET)
    return Run(path, status, value(events.DATASET, str), bool(dataset and dataset.metadata.get('is_imagenet')),
               value(keys.SUBMISSION_PLATFORM, str), resumed.get('number_of_nodes', value(events.NUM_NODES, int)),
               resumed.get('number_of_ranks', value(events.NUM_RANKS, int)),
               resumed.get('global_batch_size', value(keys.GLOBAL_BATCH_SIZE, int)),
               value(keys.OPT_BASE_LR, float), value(keys.SEED, int), value(events.TARGET_ACCURACY, float), evaluations,
               evaluations[-1][0] if status == 'converged' and evaluations else None,
               _clock_s(found), sum(e.key == events.RUN_RESUMED for e in found))
