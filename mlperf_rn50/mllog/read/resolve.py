"""Combination of a log and its system description into a Run: facts, their sources, and
findings."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LineFormat
from mlperf_rn50.mllog.findings import Grade
from mlperf_rn50.mllog.logged_run import (
    IMAGENET_TRAIN,
    IMAGENET_VAL,
    TARGET,
    V05_TARGET,
    FactSource,
    Run,
    RunStatus,
)
from mlperf_rn50.mllog.read import clock
from mlperf_rn50.mllog.read.counts import CountReader, describe_in_log
from mlperf_rn50.mllog.read.description import find_description, org_of_folder, round_of
from mlperf_rn50.mllog.read.raw_log import RawLog
from mlperf_rn50.mllog.read.values import changes, integer
from mlperf_rn50.mllog.rulesets import LATER
from mlperf_rn50.runfolder.jsonl import number
from mlperf_rn50.runfolder.locks import is_locked
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.runfolder.records import EndRecord, ResumedRecord, read_records
from mlperf_rn50.text import plural

_AVAILABILITIES = ('cloud', 'onprem', 'preview', 'research')
_ROUNDS: dict[LineFormat, str] = {'MLPv0.5.0': 'v0.5', 'MLL': 'v0.6', 'MLLOG': LATER}
_MAX_ITEMS = 64  # maximum length of a list, such as the epochs at which the learning rate falls
_MAX_CHANGES = 20  # maximum number of changed configuration keys in a warning about a resume
# A log that is not written to for this long belongs to a dead run, unless it has long gaps between
# events.
QUIET_S, _QUIET_GAPS = 600.0, 3
# even a slow run logs an event per day; a copied log has a new file time, but an old last event
_DAY_S = 86400.0


def age_s(log: Path, now_s: float) -> float | None:
    """Return the seconds since a log was last written; None if unknown."""
    try:
        return max(now_s - log.stat().st_mtime, 0.0)
    except OSError:
        return None


def _text(value: Any) -> str | None:
    return value[:1000] if isinstance(value, str) else None


def _totals(accuracy: float, candidates: list[int]) -> list[int]:
    """Return the candidate numbers of images of which an accuracy, rounded as logged, can be a
    whole number."""
    # rounding of printed digits and of float32
    rounding = 0.5 * 10.0 ** -len(repr(accuracy).partition('.')[2]) + 1e-7
    return [n for n in candidates if abs(accuracy * n - round(accuracy * n)) <= n * rounding]


def _setting(value: Any) -> Any:
    """Return an optimizer value that is valid JSON. A random name of v0.5, for a value known later,
    is DEFERRED."""
    if isinstance(value, str) and value.startswith('DEFERRED: '):
        return 'DEFERRED'
    if isinstance(value, list) and None not in [number(v, 0, 1e9) for v in value[:_MAX_ITEMS]]:
        return tuple(value[:_MAX_ITEMS])
    is_plain = (
        isinstance(value, (int, str, type(None)))
        or isinstance(value, float)
        and math.isfinite(value)
    )
    return value if is_plain else repr(value)[:200]  # JSON has no NaN


def normalized(name: str) -> str:
    """Return an organisation's name in lower case, without spaces and punctuation."""
    return ''.join(c for c in name.casefold() if c.isalnum())


class RunResolver:
    """Combines the content of a log, in its most complete line format, and a system description
    into a Run."""

    def __init__(self, path: Path, log: RawLog, last_line: int, now_s: float):
        self.path, self.log, self.last_line, self.now_s = path, log, last_line, now_s
        in_log = vars(describe_in_log(log))
        self.description = replace(
            find_description(path), **{k: fact for k, fact in in_log.items() if fact is not None}
        )
        self.sources: dict[str, FactSource] = {}
        clock.join_blocks(log)
        self.is_from_0 = clock.renumber(log)
        self.evaluations = clock.evaluations(log)

    def _org(self) -> str | None:
        """Return the submitter from the system description, else from the folder names, else from
        the log."""
        logged = _text(self.log.value(keys.SUBMISSION_ORG))
        in_log = (logged, self.log.source(keys.SUBMISSION_ORG)) if logged else None
        named = self.description.org or org_of_folder(self.path) or in_log
        if named is None:
            return None
        org, source = named
        self.sources['org'] = source
        name, logged_name = normalized(org), normalized(logged or org)
        if not name.startswith(logged_name) and not logged_name.startswith(name):
            line = self.log.line(keys.SUBMISSION_ORG)
            self.log.flag('submitter_differs', line, logged, org, source.text)
        return org

    def _target(self, round_name: str, division: str | None) -> float | None:
        logged = number(self.log.value(events.TARGET_ACCURACY), 0, 1)
        if logged is not None:
            self.sources[events.TARGET_ACCURACY] = self.log.source(events.TARGET_ACCURACY)
            return float(logged)
        if division == keys.OPEN:
            return None
        self.sources[events.TARGET_ACCURACY] = FactSource('implied', f'the rules of {round_name}')
        return V05_TARGET if round_name == 'v0.5' else TARGET

    def _data(self) -> tuple[str | None, bool, int | None, int | None]:
        """Return the name of the data set, whether it is ImageNet, and numbers of training and
        evaluation images."""
        log = self.log
        num_train = integer(log.value(keys.TRAIN_SAMPLES), 1)
        num_val = integer(log.value(keys.EVAL_SAMPLES), 1)
        is_size_of_imagenet = num_train in (None, IMAGENET_TRAIN)
        if events.DATASET in log.single:
            event = log.single[events.DATASET]
            is_imagenet = event.metadata.get('is_imagenet') is True
            if is_imagenet and not is_size_of_imagenet:
                log.flag('imagenet_of_other_size', log.line(keys.TRAIN_SAMPLES), num_train)
            return _text(event.value), is_imagenet and is_size_of_imagenet, num_train, num_val
        if not is_size_of_imagenet:
            log.flag('other_data', log.line(keys.TRAIN_SAMPLES), num_train)
            return None, False, num_train, num_val
        if num_val not in (None, IMAGENET_VAL):
            log.flag('other_validation', log.line(keys.EVAL_SAMPLES), num_val)
        return None, True, num_train or IMAGENET_TRAIN, num_val or IMAGENET_VAL

    def _is_sound(self) -> bool:
        """Return whether the log's times give a valid time to train; add findings about
        inconsistent times."""
        metrics = run_of(self.path).metrics
        resumed_at = max((line for line, _ in read_records(metrics, ResumedRecord)), default=0)
        # the end of an attempt before a resume is not that of the run
        ends = [e for line, e in read_records(metrics, EndRecord) if line > resumed_at]
        return clock.check_times(self.log, ends[-1].time_to_train_s if ends else None)

    def _status(self, target: float | None, time_s: float | None, is_sound: bool) -> RunStatus:
        """Return the status of the run; the evaluations must confirm a success."""
        log = self.log
        if keys.RUN_STOP not in log.single and self._is_written():
            return 'running'
        if keys.RUN_START not in log.single:
            log.flag('no_run_start', None)
        if keys.RUN_STOP not in log.single:
            log.flag('no_run_stop', self.last_line)
            return 'failed'
        stop = log.single[keys.RUN_STOP]
        last = self.evaluations[-1].accuracy if self.evaluations else 0.0
        if not log.is_success(stop):
            has_status = log.is_v05 or 'status' in stop.metadata
            if not has_status and target is not None and last >= target:
                log.flag('status_missing', stop.line, last, target)
                return 'failed'
            if log.has_other_end:
                return 'failed'
            reason = stop.metadata.get('reason')
            return reason if reason in ('interrupted', 'failed') else 'aborted'
        if not self.evaluations or is_sound and (time_s is None or time_s <= 0):
            kind = 'success_without_time' if self.evaluations else 'success_without_evaluation'
            log.flag(kind, stop.line)
            return 'failed'
        if target is not None and last < target:
            is_stated = not log.is_v05 or isinstance(stop.value, dict) and 'success' in stop.value
            kind = 'success_below_target' if is_stated else 'target_missed'
            log.flag(kind, stop.line, last, target)
            return 'failed' if is_stated else 'aborted'
        return 'converged' if is_sound and not log.has_other_end else 'failed'

    def _is_written(self) -> bool:
        """Return whether a log without run_stop is still being written."""
        run = run_of(self.path)
        if self.path in (run.result, run.result_v06):
            is_held = is_locked(run.lock)
            if is_held is not None:
                return is_held
        limit_s = max(QUIET_S, _QUIET_GAPS * min(self.log.longest_gap_s, _DAY_S))
        age = age_s(self.path, self.now_s)
        since_event_s = self.now_s - (self.log.last_s or 0.0)
        return age is not None and age < limit_s and since_event_s < max(limit_s, _DAY_S)

    def _round(self) -> str:
        """Return the round from the line format, or from a folder name for rounds with the same
        format."""
        name = _ROUNDS[self.log.format]
        named = [r for part in self.path.absolute().parts if (r := round_of(part))]
        if named and name == LATER and named[-1] >= 'v0.7':
            self.sources['round'] = FactSource('implied', 'the folder name')
            return named[-1]
        if named and named[-1] != name:
            self.log.flag('round_differs', None, name, named[-1])
        self.sources['round'] = FactSource('implied', 'the line format')
        return name

    def _flag_evaluations(
        self, target: float | None, num_val: int | None, status: RunStatus
    ) -> None:
        log, evaluations = self.log, self.evaluations
        if not evaluations:
            return
        last = evaluations[-1]
        for epoch, event in log.lost_evaluations(status == 'running'):
            log.flag('accuracy_missing', event.line, epoch)
        target_line = log.line(events.TARGET_ACCURACY) or 0
        reached = [e for e in evaluations if target is not None and e.accuracy >= target]
        early = [e for e in reached if e is not last and (e.line or 0) > target_line]
        if early:
            log.flag('trained_past_target', early[0].line, early[0].epoch, last.epoch)
        starts = [*log.epochs.items(), *log.blocks.items()]
        trained = max((k + start.value - 1 for k, start in starts), default=last.epoch)
        period = max((b.epoch - a.epoch for a, b in zip(evaluations, evaluations[1:])), default=1)
        # A slow evaluation may end while the next epoch is trained.
        if not trained - max(2, period) <= last.epoch <= trained:
            # Some v0.5 logs have a line for the first epoch only, so that the number of trained
            # epochs is unknown.
            is_doubtful = status == 'converged' and len(starts) > 1
            grade: Grade = 'warning' if is_doubtful else 'note'
            log.flag('evaluation_not_last', last.line, last.epoch, trained, grade=grade)
        if num_val:
            self._flag_uneven(num_val)

    def _flag_uneven(self, num_val: int) -> None:
        """Flag accuracies that are no multiples of 1/num_val, with the number of images that they
        fit."""
        accuracies = [e.accuracy for e in self.evaluations]
        misfits = [e for e in self.evaluations if not _totals(e.accuracy, [num_val])]
        if not misfits:
            return
        fits = [*range(num_val - num_val // 20, num_val + num_val // 10)]
        if len(accuracies) > 100:
            fits = []
        for accuracy in accuracies:
            fits = _totals(accuracy, fits)
        hint = f', but all are multiples of 1/{fits[0]}' if len(fits) == 1 else ''
        counts = len(misfits), len(accuracies), num_val
        self.log.flag('accuracies_uneven', misfits[0].line, *counts, hint)

    def _flag_resumes(self) -> None:
        log = self.log
        if log.resumed:
            log.flag('resumed', log.resumed[0].line, plural(len(log.resumed), 'time'))
        for event in log.resumed:
            texts = [
                f'{key[:60]} {str(before)[:40]} -> {str(now)[:40]}'
                for key, (before, now) in list(changes(event).items())[:_MAX_CHANGES]
            ]
            if texts:
                log.flag('resumed_with_changes', event.line, ', '.join(texts))

    def _init_s(self) -> float | None:
        stop, start = self.log.single.get(keys.INIT_STOP), self.log.first_init
        if not stop or not start:
            return None
        seconds = stop.time_s - start.time_s
        if seconds < -clock.SKEW_S:
            self.log.flag('init_stop_early', stop.line, -seconds, start.line)
            return None
        return max(seconds, 0.0)

    def _times(self, is_sound: bool) -> dict[str, Any]:
        """Return the fields of a Run that depend on its clock."""
        log = self.log
        time_s = log.clock_s(log.single.get(keys.RUN_STOP))
        segments = clock.train_segments(log, time_s)
        pairs = [(log.clock_s(event), number(event.value, 0, 1e9)) for event in log.rates]
        rates = tuple(sorted((t, rate) for t, rate in pairs if t is not None and rate is not None))
        for finding in clock.check_gap(log, self.evaluations, segments) if is_sound else []:
            log.findings.add(finding)
        return {
            'evaluations': self.evaluations,
            'segments': segments,
            'learning_rates': rates,
            'init_s': self._init_s(),
            'time_to_train_s': time_s if is_sound and (time_s or 0.0) >= 0 else None,
            'last_epoch': max([*log.epochs, *log.blocks, *log.accuracies], default=None),
            'num_resumes': len(log.resumed),
            'resumes': tuple(log.resumes),
        }

    def run(self) -> Run:
        log, description = self.log, self.description
        round_name = self._round()
        counts = CountReader(log, description, self.sources)
        is_sound = self._is_sound()
        if description.fault:
            # a readable description could change counts that the log does not state
            stated = {name for name, source in self.sources.items() if source.basis != 'implied'}
            is_harmless = stated >= {'num_nodes', 'num_accelerators'}
            grade: Grade = 'note' if is_harmless else description.fault.grade
            log.findings.add(description.fault._replace(grade=grade))
        times = self._times(is_sound)
        division = log.value(keys.SUBMISSION_DIVISION)
        division = division if division in (keys.OPEN, keys.CLOSED) else None
        availability = log.value(keys.SUBMISSION_STATUS)
        target = self._target(round_name, division)
        optimizer = {k: _setting(v) for k, v in sorted(log.optimizer.items())}
        dataset, is_imagenet, num_train, num_val = self._data()
        status = self._status(target, times['time_to_train_s'], is_sound)
        self._flag_evaluations(target, num_val, status)
        self._flag_resumes()
        rule = V05_TARGET if round_name == 'v0.5' else TARGET
        if target is not None and target < rule and division == keys.CLOSED and is_imagenet:
            log.flag('target_low', log.line(events.TARGET_ACCURACY), target, rule, round_name)
        if log.seed:
            self.sources['seed'] = FactSource('logged', keys.SEED, log.seed.line)
        start = log.single.get(keys.RUN_START)
        lines = {key: event.line for key, event in log.single.items()}
        if log.resumed:
            lines[events.RUN_RESUMED] = log.resumed[0].line
        return Run(
            self.path,
            round_name,
            status,
            org=self._org(),
            logged_org=_text(log.value(keys.SUBMISSION_ORG)),
            platform=_text(log.value(keys.SUBMISSION_PLATFORM)),
            division=division,
            submission_status=availability if availability in _AVAILABILITIES else None,
            dataset=dataset,
            is_imagenet=is_imagenet,
            num_nodes=counts.num_nodes,
            has_changed_nodes=counts.has_changed_nodes,
            num_ranks=counts.num_ranks,
            num_accelerators=counts.num_accelerators,
            global_batch_size=counts.global_batch_size,
            accelerator=description.accelerator if counts.num_accelerators != 0 else None,
            framework=description.framework,
            node_gbit_s=description.node_gbit_s,
            opt_name=_text(optimizer.get(keys.OPT_NAME)),
            optimizer=optimizer,
            options=log.options,
            seed=integer(log.seed.value, -(2**63), 2**64) if log.seed else None,
            target_accuracy=target,
            train_samples=num_train,
            eval_samples=num_val,
            epochs_to_converge=self.evaluations[-1].epoch if status == 'converged' else None,
            is_from_0=self.is_from_0,
            last_s=log.last_s,
            start_s=start.time_s if start else None,
            age_s=age_s(self.path, self.now_s) if status == 'running' else None,
            sources=self.sources,
            lines=lines,
            findings=log.findings.in_file(self.path),
            **times,
        )
