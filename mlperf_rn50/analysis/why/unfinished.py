"""First sentence about a run that has not trained to the end of its schedule."""

import shlex

from mlperf_rn50.analysis.run_data import RunData, load_run_config
from mlperf_rn50.config import Config
from mlperf_rn50.mllog.elapsed import gaps_of, outside_s
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.runfolder.names import newest_step
from mlperf_rn50.runfolder.records import CourseRecord, EndRecord, TrainRecord
from mlperf_rn50.text import duration, significant


def unfinished_sentence(run: RunData) -> str:
    """Return how far a run is that has not trained to the end of its schedule; '' for others."""
    run = run.preserved()
    log, config, last = run.log, run.config, run.last(TrainRecord)
    if not log or not config or log.status == 'converged':
        return ''
    evaluated = log.curve[-1][0] if log.curve else 0.0
    # The last steps of a run that has ended may not be recorded.
    epoch = max(last.epoch, evaluated) if last and log.status != 'aborted' else evaluated
    schedule = max(1, int(config.schedule.decay_epochs))
    planned = config.num_epochs
    done = f'after {significant(epoch)} of {planned} epochs'
    if log.status == 'running':
        first = _first_evaluation(log, config, last)
        return f'Running: {significant(epoch)} of at most {planned} epochs{first}.'
    if log.status == 'interrupted':
        return f'Stopped {done}{_resume(run, log)}.'
    if log.status == 'failed':
        end = next(reversed(run.records), None)
        if not isinstance(end, EndRecord):
            return f'Failed {done}{_resume(run, log)}.'
        reason = f'; {run.folder.train_log.name} has the reason'
        return f'Failed {done}{reason}.' if end.status == 'failed' else ''
    if was_behind(run, config) and evaluated < planned:
        return f'Ended {done}, because it was behind its reference runs.'
    return (
        f'Trained {planned} of the {schedule} epochs of its schedule.' if planned < schedule else ''
    )


def was_behind(run: RunData, config: Config) -> bool:
    """Return whether a run stops, or has stopped, because it is behind its reference runs."""
    standing = run.last(CourseRecord)
    return bool(config.run.stop_when_behind and standing and standing.behind)


def _first_evaluation(log: Run, config: Config, last: TrainRecord | None) -> str:
    # the last epoch ends with an evaluation, too
    first = min(config.train.eval_offset + 1, config.num_epochs)
    left = first - last.epoch if last else 0.0
    if log.curve or not last or not last.epoch or not last.time_s or left < 0:
        return ''
    left_s = left * outside_s(gaps_of(log.resumes), 0.0, last.time_s) / last.epoch
    return (
        f'; the first evaluation, with the times of its ranks, is due in about {duration(left_s)}'
    )


def _has_other_size(log: Run, begun: Config) -> bool:
    """Return whether a run has lost ranks of its configuration."""
    ranks, batch = begun.world_size, begun.global_batch_size(log.num_ranks)
    return any(
        begun_with and now not in (None, begun_with)
        for begun_with, now in ((ranks, log.num_ranks), (batch, log.global_batch_size))
    )


def _resume(run: RunData, log: Run) -> str:
    if newest_step(run.folder.checkpoints) < 0:
        return '; it has no checkpoint to resume'
    nodes, ranks = log.num_nodes or 1, log.num_ranks or 1
    words = ['launch/ranks.sh', *['--hosts HOSTS'] * (nodes > 1), str(ranks // nodes)]
    words += ['mlperf-rn50 train --resume', shlex.quote(str(run.folder.checkpoints))]
    begun = load_run_config(run.folder, ())
    if begun and _has_other_size(log, begun):
        words.append('--elastic')
    return f'; resume with {" ".join(words)}'
