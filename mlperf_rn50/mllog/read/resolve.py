"""From what the lines of a log say, and the description beside it, to a Run: what counts, and what contradicts it."""
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlperf_rn50.locks import is_locked
from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LineFormat
from mlperf_rn50.mllog.read import clock
from mlperf_rn50.mllog.read.description import SystemDescription, org_of_folder, round_of
from mlperf_rn50.mllog.read.layout import LayoutReader
from mlperf_rn50.mllog.read.raw_log import RawLog, integer, number
from mlperf_rn50.mllog.run import (
    IMAGENET_TRAIN,
    IMAGENET_VAL,
    TARGET,
    V05_TARGET,
    Evaluation,
    FactSource,
    Run,
    RunStatus,
)

_SUBMISSION_STATUSES = ('cloud', 'onprem', 'preview', 'research')
_ROUNDS: dict[LineFormat, str] = {'MLPv0.5.0': 'v0.5', 'MLL': 'v0.6', 'MLLOG': 'v0.7+'}
_MAX_CHANGES = 20  # keys of a configuration that a resumed run changed
# A log that was not written for so long is that of a run that died, unless its own pace is slower.
_QUIET_S = 600.0
_QUIET_GAPS = 3
# However slow a run is, something happens in a day; and a copy of an old log is as old as its last event.
_DAY_S = 86400.0


def age_s(log: Path, now_s: float) -> float | None:
    """Return the seconds since a log was last written; None if unknown."""
    try:
        return max(now_s - log.stat().st_mtime, 0.0)
    except OSError:
        return None


def _text(value: Any) -> str | None:
    return value[:1000] if isinstance(value, str) else None


def _is_share(accuracy: float, num_images: int) -> bool:
    """Whether a fraction, as a log prints it, can be a whole number of images out of so many."""
    digits = len(repr(accuracy).partition('.')[2])
    rounding = num_images * (0.5 * 10.0 ** -digits + 1e-7)  # of the print, and of a float32
    return abs(accuracy * num_images - round(accuracy * num_images)) <= rounding


def _changes(changed: Any) -> str:
    """The keys of a configuration that a resumed run changed, each with the value before and now; '' for none."""
    pairs = list(changed.items())[:_MAX_CHANGES] if isinstance(changed, dict) else []
    return ', '.join(f'{key[:60]} {str(values[0])[:40]} -> {str(values[1])[:40]}' for key, values in pairs
                     if isinstance(values, list) and len(values) == 2)


def _plain(name: str) -> str:
    """The name of an organisation without the ways to write it."""
    return ''.join(c for c in name.casefold() if c.isalnum())


class RunResolver:
    """Turns what was found in a log, in the lines of the format that says most, and what lies beside it, into a Run."""

    def __init__(self, path: Path, found: RawLog, description: SystemDescription, last_line: int, now_s: float):
        self.path, self.found, self.description = path, found, description
        self.last_line, self.now_s = last_line, now_s
        self.sources: dict[str, FactSource] = {}

    def _logged(self, key: str) -> FactSource:
        return FactSource('logged', key, self.found.line(key))

    def _org(self) -> str | None:
        """Who submits: the submission says so itself, a log says it only where there is none."""
        logged = _text(self.found.value(keys.SUBMISSION_ORG))
        in_log = (logged, self._logged(keys.SUBMISSION_ORG)) if logged else None
        named = self.description.org or org_of_folder(self.path) or in_log
        if named is None:
            return None
        org, source = named
        self.sources['org'] = source
        mine, its = _plain(org), _plain(logged or org)
        if not mine.startswith(its) and not its.startswith(mine):
            self.found.contradict(self.found.line(keys.SUBMISSION_ORG), f'submission_org is {logged!r:.80}, '
                                  f'{source.text} says {org!r:.80}, which counts')
        return org

    def _target(self, round_name: str, division: str | None) -> float | None:
        logged = number(self.found.value(events.TARGET_ACCURACY), 0, 1)
        if logged is not None:
            self.sources[events.TARGET_ACCURACY] = self._logged(events.TARGET_ACCURACY)
            return float(logged)
        if division == keys.OPEN:
            return None
        self.sources[events.TARGET_ACCURACY] = FactSource('implied', f'the rules of {round_name}')
        return V05_TARGET if round_name == 'v0.5' else TARGET

    def _data(self) -> tuple[str | None, bool, int | None, int | None]:
        """Name of the data set, whether it is ImageNet, training and evaluation images."""
        found = self.found
        num_train, num_val = integer(found.value(keys.TRAIN_SAMPLES), 1), integer(found.value(keys.EVAL_SAMPLES), 1)
        if events.DATASET in found.single:
            event = found.single[events.DATASET][1]
            is_imagenet = event.metadata.get('is_imagenet') is True
            if is_imagenet and num_train not in (None, IMAGENET_TRAIN):
                found.contradict(found.line(keys.TRAIN_SAMPLES), f'{num_train} training images, ImageNet has '
                                 f'{IMAGENET_TRAIN}: this is another data set, whatever the log calls it')
                is_imagenet = False
            return _text(event.value), is_imagenet, num_train, num_val
        is_imagenet = num_train in (None, IMAGENET_TRAIN)
        if not is_imagenet:
            found.warn(found.line(keys.TRAIN_SAMPLES), f'{num_train} training images, ImageNet has {IMAGENET_TRAIN}: '
                                                       'this is another data set')
        elif num_val not in (None, IMAGENET_VAL):
            found.warn(found.line(keys.EVAL_SAMPLES), f'evaluations over {num_val} images, ImageNet has {IMAGENET_VAL}')
        return (None, is_imagenet, num_train or (IMAGENET_TRAIN if is_imagenet else None),
                num_val or (IMAGENET_VAL if is_imagenet else None))

    def _is_sound(self) -> bool:
        """Whether the times of the log nest, and what other formats in it say agrees; says where not."""
        found = self.found
        odd = clock.contradictions(found)
        for line, text, many in odd:
            found.contradict(line, f'{text}: the clock contradicts itself, and its time does not count', many)
        for line, text, many in clock.misplaced(found):
            found.contradict(line, text, many)
        return not odd

    def _status(self, evaluations: tuple[Evaluation, ...], target: float | None, time_s: float | None,
                is_sound: bool) -> RunStatus:
        """How the run ended, which is a success only where the evaluations bear it out."""
        found = self.found
        if keys.RUN_START not in found.single:
            found.warn(None, 'no run_start: the time to train is not known')
        if keys.RUN_STOP not in found.single:
            if self._is_written():
                return 'running'
            found.warn(self.last_line, 'no run_stop: the log ends here')
            return 'failed'
        mark, stop = found.single[keys.RUN_STOP]
        reason, is_v05 = stop.metadata.get('reason'), found.format == 'MLPv0.5.0'
        last = evaluations[-1].accuracy if evaluations else 0.0
        if not found.says_success(stop):
            if not is_v05 and 'status' not in stop.metadata and target is not None and last >= target:
                found.contradict(mark.line, f'run_stop says nothing of success, though the last evaluation, {last:g}, '
                                            f'reaches the target of {target:g}: this counts as none')
            return 'failed' if found.has_other_end else reason if reason in ('interrupted', 'failed') else 'aborted'
        if not evaluations or is_sound and (time_s is None or time_s <= 0):
            found.contradict(mark.line, 'says success, but ' + ('run_stop does not stand after run_start' if evaluations
                                                                else 'has no evaluation'))
            return 'failed'
        if target is not None and last < target:
            found.contradict(mark.line, f'{"" if is_v05 else "says success, but "}the last evaluation, {last:g}, is '
                                        f'below the target of {target:g}')
            return 'aborted'
        return 'converged' if is_sound and not found.has_other_end else 'failed'

    def _is_written(self) -> bool:
        """Whether a log without run_stop belongs to a run that is not over."""
        lock = re.fullmatch(r'result_(\d+)(?:_v0\.6)?', self.path.stem)
        if lock and (is_held := is_locked(self.path.with_name(f'.run_{lock[1]}.lock'))) is not None:
            return is_held
        limit_s = max(_QUIET_S, _QUIET_GAPS * min(self.found.longest_gap_s, _DAY_S))
        age, since_event_s = age_s(self.path, self.now_s), self.now_s - (self.found.last_s or 0.0)
        return age is not None and age < limit_s and since_event_s < max(limit_s, _DAY_S)

    def _round(self) -> str:
        """The round of the lines; of later ones the lines do not say which, but a folder may."""
        name = _ROUNDS[self.found.format]
        named = [r for part in self.path.absolute().parts if (r := round_of(part))]
        if named and name == 'v0.7+' and named[-1] >= 'v0.7':
            self.sources['round'] = FactSource('implied', 'the name of a folder')
            return named[-1]
        if named and named[-1] != name:
            self.found.contradict(None, f'lies in a folder {named[-1]}, but has the lines of {name}')
        self.sources['round'] = FactSource('implied', 'the format of the lines')
        return name

    def _flag(self, target: float | None, num_val: int | None, evaluations: tuple[Evaluation, ...]) -> None:
        """Says what a reader of the numbers must know."""
        found = self.found
        early = [e for e in evaluations[:-1] if target is not None and e.accuracy >= target]
        if early:
            found.contradict(early[0].line, f'epoch {early[0].epoch} had reached the target; the run went on to epoch '
                                            f'{evaluations[-1].epoch}, which counts')
        if evaluations:
            self._flag_epoch(evaluations)
        odd = [e for e in evaluations if num_val and not _is_share(e.accuracy, num_val)]
        if odd and num_val:
            fits = [n for n in range(num_val - num_val // 20, num_val + num_val // 10)
                    if all(_is_share(e.accuracy, n) for e in evaluations)] if len(evaluations) <= 100 else []
            of_images = f', but of {fits[0]}' if len(fits) == 1 else ''
            found.warn(odd[0].line, f'{len(odd)} of {len(evaluations)} accuracies are not shares of {num_val} '
                                    f'images{of_images}')
        if found.resumes:
            found.warn(found.resumes[0][0].line, f'the run was resumed {len(found.resumes)} times: its log is not that '
                                                 'of one timed run and cannot be submitted')
        for mark, event in found.resumes:
            if text := _changes(event.metadata.get('changed')):
                found.warn(mark.line, f'the run went on with another configuration: {text}')

    def _flag_epoch(self, evaluations: tuple[Evaluation, ...]) -> None:
        """Says where the last evaluation is of an epoch that was not trained, or of one long before the last."""
        found, last = self.found, evaluations[-1]
        trained = max((k + count - 1 for starts in (found.epochs, found.blocks) for k, (_, count) in starts.items()),
                      default=last.epoch)
        period = max((b.epoch - a.epoch for a, b in zip(evaluations, evaluations[1:])), default=1)
        # One that takes its time may be of an epoch before the one that is trained meanwhile.
        if not trained - max(2, period) <= last.epoch <= trained:
            found.contradict(last.line, f'the last evaluation is of epoch {last.epoch}, the last epoch that was '
                                        f'trained is {trained}')

    def _flag_target(self, target: float | None, round_name: str, division: str | None, is_imagenet: bool) -> None:
        """Says where a log of the closed division names a target of its own."""
        rule = V05_TARGET if round_name == 'v0.5' else TARGET
        if target is not None and target < rule and division == keys.CLOSED and is_imagenet:
            self.found.contradict(self.found.line(events.TARGET_ACCURACY), f'the target is {target:g}, the closed '
                                  f'division of {round_name} asks for {rule:g}')

    def _init_s(self) -> float | None:
        found = self.found
        stop, start = found.single.get(keys.INIT_STOP), found.first_init
        if not stop or not start:
            return None
        seconds = stop[0].time_s - start.time_s
        if seconds < -clock.SKEW_S:
            found.contradict(stop[0].line, f'init_stop stands {-seconds:.1f} s before init_start (line {start.line})')
            return None
        return max(seconds, 0.0)

    def _optimizer(self) -> Mapping[str, Any]:
        def is_plain(value: Any) -> bool:  # and no NaN, which JSON does not have
            return isinstance(value, (int, str, type(None))) or isinstance(value, float) and math.isfinite(value)
        return MappingProxyType({k: v if is_plain(v) else repr(v)[:200]
                                 for k, v in sorted(self.found.optimizer.items())})

    def _course(self, is_sound: bool) -> dict[str, Any]:
        """The fields of a Run that its clock tells."""
        found = self.found
        stop = found.single.get(keys.RUN_STOP)
        time_s = found.clock_s(stop[0]) if stop else None
        evaluations, stretches = clock.evaluations_of(found), clock.stretches_of(found, time_s)
        for line, text, many in clock.stop_gap(found, evaluations, stretches) if is_sound else []:
            found.contradict(line, text, many)
        return {'evaluations': evaluations, 'stretches': stretches, 'learning_rates': clock.learning_rates_of(found),
                'init_s': self._init_s(), 'time_to_train_s': time_s if is_sound and (time_s or 0.0) >= 0 else None,
                'last_epoch': found.last_epoch, 'num_resumes': len(found.resumes)}

    def run(self) -> Run:
        """The Run."""
        found, description = self.found, self.description
        clock.renumber(found)
        round_name, layout, is_sound = self._round(), LayoutReader(found, description, self.sources), self._is_sound()
        course = self._course(is_sound)
        division = found.value(keys.SUBMISSION_DIVISION)
        division = division if division in (keys.OPEN, keys.CLOSED) else None
        submission_status = found.value(keys.SUBMISSION_STATUS)
        target, optimizer = self._target(round_name, division), self._optimizer()
        dataset, is_imagenet, num_train, num_val = self._data()
        evaluations = course['evaluations']
        status = self._status(evaluations, target, course['time_to_train_s'], is_sound)
        self._flag(target, num_val, evaluations)
        self._flag_target(target, round_name, division, is_imagenet)
        if found.seed:
            self.sources['seed'] = FactSource('logged', keys.SEED, found.seed[0])
        return Run(
            self.path, round_name, status, org=self._org(), platform=_text(found.value(keys.SUBMISSION_PLATFORM)),
            division=division,
            submission_status=submission_status if submission_status in _SUBMISSION_STATUSES else None, dataset=dataset,
            is_imagenet=is_imagenet, num_nodes=layout.num_nodes, num_ranks=layout.num_ranks,
            num_accelerators=layout.num_accelerators, global_batch_size=layout.global_batch_size,
            accelerator=description.accelerator if layout.num_accelerators != 0 else None,
            framework=description.framework, opt_name=_text(optimizer.get(keys.OPT_NAME)),
            optimizer=optimizer, seed=integer(found.seed[1], -2**63, 2**64) if found.seed else None,
            target_accuracy=target, train_samples=num_train, eval_samples=num_val,
            epochs_to_converge=evaluations[-1].epoch if status == 'converged' else None,
            age_s=age_s(self.path, self.now_s) if status == 'running' else None,
            sources=MappingProxyType(self.sources),
            lines=MappingProxyType({key: mark.line for key, (mark, _) in found.single.items()}),
            warnings=found.notes.warnings(), **course)
