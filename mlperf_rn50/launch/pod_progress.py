"""Whether a job gets on, judged by its run folder, and what its pods tell Kubernetes when they end."""
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.files import dump_json
from mlperf_rn50.launch.attempts import MAX_STUCK, end_of, newest_run, read_metrics
from mlperf_rn50.train.checkpoint import newest_step
from mlperf_rn50.train.run_folder import RunFolder, next_index, run_numbers

_FINAL = {'converged': EXIT_OK, 'aborted': EXIT_FAILED, 'failed': EXIT_FAILED}
_NO_CHECKPOINT = (-1, -1)


@dataclass(frozen=True)
class Attempt:
    """An attempt of a job, as pod 0 keeps it in the run folder.

    Args:
        job: which job's.
        run: number of the run.
        number: from 1, of the attempts since the newest checkpoint.
        newest: run and step of the newest checkpoint when it began, -1 and -1 for none.
    """

    job: str
    run: int
    number: int
    newest: tuple[int, int]


def _record_path(run_dir: Path) -> Path:
    return run_dir / 'pods.json'


def read_attempt(run_dir: Path) -> Attempt | None:
    """The last attempt in a run folder; None where there is none that can be read."""
    try:
        attempt = Attempt(**json.loads(_record_path(run_dir).read_text()))
        run, step = attempt.newest
        return Attempt(str(attempt.job), int(attempt.run), int(attempt.number), (int(run), int(step)))
    except (OSError, ValueError, TypeError):
        return None


def write_attempt(run_dir: Path, attempt: Attempt) -> None:
    """Keeps an attempt in its run folder."""
    dump_json(_record_path(run_dir), asdict(attempt))


def run_ends(run: RunFolder) -> list[str]:
    """How a run ended, each time it did by its own account: converged, aborted, interrupted or failed."""
    return [end for line in read_metrics(run) if (end := end_of([line]))]


def newest_checkpoint(run_dir: Path) -> tuple[int, int]:
    """Run and step of the newest checkpoint of the newest run that has one; -1 and -1 where none has."""
    steps = [(n, newest_step(RunFolder(run_dir, n).checkpoints)) for n in run_numbers(run_dir)]
    return max((found for found in steps if found[1] >= 0), default=_NO_CHECKPOINT)


def resumable_run(run_dir: Path) -> int | None:
    """Number of the newest run if it has a checkpoint and did not come to its end; None for a new run."""
    run = newest_run(run_dir)
    if not run or newest_step(run.checkpoints) < 0 or (run_ends(run) or [''])[-1] in _FINAL:
        return None
    return run.index


def next_attempt(last: Attempt | None, job: str, run: int, newest: tuple[int, int]) -> Attempt:
    """The attempt after the last one: the first again for another job, or where there is a newer checkpoint."""
    is_stuck = last is not None and last.job == job and newest <= last.newest
    return Attempt(job, run, last.number + 1 if last and is_stuck else 1, newest)


def plan_attempt(run_dir: Path, job: str) -> tuple[Attempt, int | None]:
    """The attempt that comes now, and the number of the run it goes on with, None for a new one."""
    resume = resumable_run(run_dir)
    run = next_index(run_dir) if resume is None else resume
    return next_attempt(read_attempt(run_dir), job, run, newest_checkpoint(run_dir)), resume


def finished_code(run_dir: Path, job: str) -> int | None:
    """Exit code of a pod that was started again after the job's run came to its end; None where there is more to do."""
    last = read_attempt(run_dir)
    if last is None or last.job != job:
        return None
    return _FINAL.get((run_ends(RunFolder(run_dir, last.run)) or [''])[-1])


def pod_code(codes: Sequence[int]) -> int:
    """The worst exit code of a pod's ranks: a mistake, then a failure or a signal, then a stop."""
    failed = [c for c in codes if c not in (EXIT_OK, EXIT_RESUMABLE)]
    if EXIT_USAGE in failed or not codes:
        return EXIT_USAGE if failed else EXIT_RESUMABLE
    return failed[0] if failed else max(codes)


def exit_code(index: int, codes: Sequence[int], end: str | None, is_asked: bool, num_stuck: int) -> int:
    """Exit code of a pod whose ranks have ended: 0 done, 1 failed, 2 a mistake, 75 to be started again.

    Pod 0 decides for the job. Another one cannot tell a run that failed from a rank that lost the others, and does not
    judge it.

    Args:
        index: of the pod.
        codes: exit codes of its ranks, negative for a signal; none where they were not started.
        end: how the run ended by its own account in this attempt, None if it did not.
        is_asked: whether the pod was asked to stop.
        num_stuck: attempts since the newest checkpoint, this one included.
    """
    if index == 0 and end in _FINAL:
        return _FINAL[end]
    worst = pod_code(codes)
    if worst == EXIT_USAGE or (worst == EXIT_OK and index > 0):
        return worst
    if index == 0 and not is_asked and end != 'interrupted' and num_stuck >= MAX_STUCK:
        return EXIT_FAILED
    return EXIT_RESUMABLE
