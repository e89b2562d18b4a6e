"""From what the lines of a log say, and the description beside it, to a Run: what counts, and what contradicts it."""
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlperf_rn50.mlperf import events, keys
from mlperf_rn50.mlperf.collect import INPUT_BATCH_SIZE, Found, integer, number
from mlperf_rn50.mlperf.course import evaluations_of, learning_rates_of, stretches_of
from mlperf_rn50.mlperf.description import Description
from mlperf_rn50.mlperf.events import LineFormat
from mlperf_rn50.mlperf.run import IMAGENET_TRAIN, IMAGENET_VAL, TARGET, V05_TARGET, Evaluation, Run, RunStatus, Source

# v0.5 logs an accelerator's batch, some organisations the global one; no accelerator of that round held so many.
_NOT_LOCAL = 1024
_SUBMISSION_STATUSES = ('cloud', 'onprem', 'preview', 'research')
_ROUNDS: dict[LineFormat, str] = {'MLPv0.5.0': 'v0.5', 'MLL': 'v0.6', 'MLLOG': 'v0.7+'}

_MAX_CHANGES = 20  # keys of a configuration that a resumed run changed


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


class Facts:
    """Turns what was found in a log, and what lies beside it, into a Run."""

    def __init__(self, path: Path, found: Found, description: Description | None, last_line: int):
        self.path, self.found, self.description, self.last_line = path, found, description, last_line
        self.sources: dict[str, Source] = {}

    def _logged(self, key: str) -> Source:
        return Source('logged', key, self.found.line(key))

    def _counted(self, key: str, name: str) -> Source:
        return Source('implied', f'the {self.found.counts[key]} lines {name}', self.found.first_lines.get(key))

    def _described(self, line: int | None) -> Source:
        path = self.description.path if self.description else None
        return Source('described', path.name if path else '', line, path)

    def _settle(self, name: str, unit: str, *evidence: tuple[int | None, Source]) -> int | None:
        """The first of several statements on one fact; says what contradicts it.

        A resumed run may have gone on with other ranks: what its last resume says counts alone.
        """
        if self.found.resumes:
            key = {'num_nodes': events.NUM_NODES, 'num_ranks': events.NUM_RANKS}.get(name, name)
            resumed = integer(self.found.resumes[-1][1].metadata.get(key), 1)
            evidence = ((resumed, self._logged(events.RUN_RESUMED)), *evidence)
        known = [(value, source) for value, source in evidence if value is not None]
        if not known:
            return None
        value, source = known[0]
        self.sources[name] = source
        for other, where in known[1:] if not self.found.resumes else []:
            if other != value:
                line = None if where.path else where.line
                self.found.warn(line, f'{where.text} says {other} {unit}, {source.text} {value}; {value} counts')
                break
        return value

    def _of_entry(self, name: str) -> int | None:
        """A number of the system description that v0.6 logs hold as text."""
        m = re.search(rf"'{name}': \\?'(\d{{1,9}})", _text(self.found.value(keys.SUBMISSION_ENTRY)) or '')
        return int(m[1]) if m else None

    def _nodes(self) -> int | None:
        found, description = self.found, self.description
        platform = _text(found.value(keys.SUBMISSION_PLATFORM)) or ''
        clears, times = found.counts[keys.CACHE_CLEAR], re.match(r'(\d{1,6})x(?=\D)', platform)
        return self._settle(
            'num_nodes', 'nodes',
            (integer(found.value(events.NUM_NODES), 1), self._logged(events.NUM_NODES)),
            (integer(self._of_entry('num_nodes'), 1), self._logged(keys.SUBMISSION_ENTRY)),
            (clears if clears > 1 else None, self._counted(keys.CACHE_CLEAR, 'that clear a cache')),
            (integer(description.num_nodes, 1) if description else None,
             self._described(description.nodes_line if description else None)),
            (integer(int(times[1]), 1) if times else None,
             Source('implied', keys.SUBMISSION_PLATFORM, found.line(keys.SUBMISSION_PLATFORM))))

    def _ranks(self) -> int | None:
        found = self.found
        inits, seeds = found.counts[keys.INIT_START], found.counts[keys.SEED]
        return self._settle(
            'num_ranks', 'ranks', (integer(found.value(events.NUM_RANKS), 1), self._logged(events.NUM_RANKS)),
            (inits if inits > 1 else None, self._counted(keys.INIT_START, 'of init_start')),
            (seeds if seeds > 1 and found.format == 'MLPv0.5.0' else None, self._counted(keys.SEED, 'of seeds')))

    def _accelerators(self, num_nodes: int | None, num_ranks: int | None) -> int | None:
        found, description = self.found, self.description
        per_node = integer(found.value(events.ACCELERATORS_PER_NODE))
        nodes_of_entry, of_entry = self._of_entry('num_nodes'), self._of_entry('num_accelerators')
        described = description.num_accelerators if description else None
        if described is not None and description and description.is_of_one_node:
            described *= num_nodes or 1
        # A rank drives an accelerator in every published log; ours says it itself.
        ranks = num_ranks if described != 0 and events.NUM_RANKS not in found.single else None
        return self._settle(
            'num_accelerators', 'accelerators',
            (per_node * num_nodes if per_node is not None and num_nodes else None,
             self._logged(events.ACCELERATORS_PER_NODE)),
            (of_entry * nodes_of_entry if of_entry is not None and nodes_of_entry else None,
             self._logged(keys.SUBMISSION_ENTRY)),
            (ranks, self.sources.get('num_ranks', Source('implied', ''))),
            (described, self._described(description.accelerators_line if description else None)))

    def _batch(self, num_accelerators: int | None) -> int | None:
        found = self.found
        local, line = integer(found.value(INPUT_BATCH_SIZE), 1), found.line(INPUT_BATCH_SIZE)
        logged = integer(found.value(keys.GLOBAL_BATCH_SIZE), 1), self._logged(keys.GLOBAL_BATCH_SIZE)
        if local and local >= _NOT_LOCAL:
            whole = Source('implied', 'input_batch_size, too large for one accelerator', line)
            return self._settle(keys.GLOBAL_BATCH_SIZE, 'images a step', logged, (local, whole))
        return self._settle(keys.GLOBAL_BATCH_SIZE, 'images a step', logged,
                            (local * num_accelerators if local and num_accelerators else None,
                             Source('implied', 'input_batch_size x num_accelerators', line)))

    def _target(self, round_name: str, division: str | None) -> float | None:
        logged = number(self.found.value(events.TARGET_ACCURACY), 0, 1)
        if logged is not None:
            self.sources[events.TARGET_ACCURACY] = self._logged(events.TARGET_ACCURACY)
            return float(logged)
        if division == keys.OPEN:
            return None
        self.sources[events.TARGET_ACCURACY] = Source('implied', f'the rules of {round_name}')
        return V05_TARGET if round_name == 'v0.5' else TARGET

    def _data(self) -> tuple[str | None, bool, int | None, int | None]:
        """Name of the data set, whether it is ImageNet, training and evaluation images."""
        found = self.found
        num_train, num_val = integer(found.value(keys.TRAIN_SAMPLES), 1), integer(found.value(keys.EVAL_SAMPLES), 1)
        if events.DATASET in found.single:
            event = found.single[events.DATASET][1]
            return _text(event.value), event.metadata.get('is_imagenet') is True, num_train, num_val
        is_imagenet = num_train in (None, IMAGENET_TRAIN)
        if not is_imagenet:
            found.warn(found.line(keys.TRAIN_SAMPLES), f'{num_train} training images, ImageNet has {IMAGENET_TRAIN}: '
                                                       'this is another data set')
        elif num_val not in (None, IMAGENET_VAL):
            found.warn(found.line(keys.EVAL_SAMPLES), f'evaluations over {num_val} images, ImageNet has {IMAGENET_VAL}')
        return (None, is_imagenet, num_train or (IMAGENET_TRAIN if is_imagenet else None),
                num_val or (IMAGENET_VAL if is_imagenet else None))

    def _status(self, evaluations: tuple[Evaluation, ...], target: float | None, time_s: float | None) -> RunStatus:
        """How the run ended, which is a success only where the evaluations bear it out."""
        found = self.found
        if keys.RUN_START not in found.single:
            found.warn(None, 'no run_start: the time to train is not known')
        if keys.RUN_STOP not in found.single:
            found.warn(self.last_line, 'no run_stop: the log ends here')
            return 'failed'
        mark, stop = found.single[keys.RUN_STOP]
        reason, is_v05 = stop.metadata.get('reason'), found.format == 'MLPv0.5.0'
        if is_v05:  # published v0.5 logs say nothing, which is no objection
            says_success = not (isinstance(stop.value, dict) and stop.value.get('success') in (False, 'false'))
        else:
            says_success = stop.metadata.get('status') == keys.SUCCESS
        if not says_success:
            return reason if reason in ('interrupted', 'failed') else 'aborted'
        if not evaluations or time_s is None or time_s <= 0:
            found.warn(mark.line, 'says success, but ' + ('run_stop does not stand after run_start' if evaluations else
                                                          'has no evaluation'))
            return 'failed'
        last = evaluations[-1].accuracy
        if target is not None and last < target:
            found.warn(mark.line, f'{"" if is_v05 else "says success, but "}the last evaluation, {last:g}, is below '
                                  f'the target of {target:g}')
            return 'aborted'
        return 'converged'

    def _round(self) -> str:
        """The round of the lines; of later ones the lines do not say which, but a folder may."""
        name = _ROUNDS[self.found.format]
        named = [m[1] for part in self.path.absolute().parts
                 if (m := re.fullmatch(r'(?:training_results_)?(v\d\.\d)(?:\.0)?', part))]
        if named and name == 'v0.7+' and named[-1] >= 'v0.7':
            self.sources['round'] = Source('implied', 'the name of a folder')
            return named[-1]
        if named and named[-1] != name:
            self.found.warn(None, f'lies in a folder {named[-1]}, but has the lines of {name}')
        self.sources['round'] = Source('implied', 'the format of the lines')
        return name

    def _flag(self, target: float | None, num_val: int | None, evaluations: tuple[Evaluation, ...]) -> None:
        """Says what a reader of the numbers must know."""
        found = self.found
        early = [e for e in evaluations[:-1] if target is not None and e.accuracy >= target]
        if early:
            found.warn(early[0].line, f'epoch {early[0].epoch} had reached the target; the run went on to epoch '
                                      f'{evaluations[-1].epoch}, which counts')
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

    def _init_s(self) -> float | None:
        stop, start = self.found.single.get(keys.INIT_STOP), self.found.first_init
        return max(stop[0].time_s - start.time_s, 0.0) if stop and start else None

    def _optimizer(self) -> Mapping[str, Any]:
        plain = (int, float, str, bool, type(None))
        return MappingProxyType({k: v if isinstance(v, plain) else repr(v)[:200]
                                 for k, v in sorted(self.found.optimizer.items())})

    def run(self) -> Run:
        """The Run."""
        found = self.found
        round_name, num_nodes, num_ranks = self._round(), self._nodes(), self._ranks()
        num_accelerators = self._accelerators(num_nodes, num_ranks)
        division = found.value(keys.SUBMISSION_DIVISION)
        division = division if division in (keys.OPEN, keys.CLOSED) else None
        submission_status = found.value(keys.SUBMISSION_STATUS)
        target, optimizer = self._target(round_name, division), self._optimizer()
        dataset, is_imagenet, num_train, num_val = self._data()
        evaluations = evaluations_of(found)
        stop = found.single.get(keys.RUN_STOP)
        time_s = found.clock_s(stop[0]) if stop else None
        status = self._status(evaluations, target, time_s)
        self._flag(target, num_val, evaluations)
        if found.seed:
            self.sources['seed'] = Source('logged', keys.SEED, found.seed[0])
        return Run(
            self.path, round_name, status,
            org=_text(found.value(keys.SUBMISSION_ORG)) or (self.description.org if self.description else None),
            platform=_text(found.value(keys.SUBMISSION_PLATFORM)), division=division,
            submission_status=submission_status if submission_status in _SUBMISSION_STATUSES else None, dataset=dataset,
            is_imagenet=is_imagenet, num_nodes=num_nodes, num_ranks=num_ranks, num_accelerators=num_accelerators,
            accelerator=self.description.accelerator if self.description and num_accelerators != 0 else None,
            framework=self.description.framework if self.description else None,
            global_batch_size=self._batch(num_accelerators), opt_name=_text(optimizer.get(keys.OPT_NAME)),
            optimizer=optimizer, seed=integer(found.seed[1], -2**63, 2**64) if found.seed else None,
            target_accuracy=target, train_samples=num_train, eval_samples=num_val, evaluations=evaluations,
            stretches=stretches_of(found, time_s), learning_rates=learning_rates_of(found), init_s=self._init_s(),
            epochs_to_converge=evaluations[-1].epoch if status == 'converged' else None,
            time_to_train_s=time_s if time_s is not None and time_s >= 0 else None, num_resumes=len(found.resumes),
            sources=MappingProxyType(self.sources),
            lines=MappingProxyType({key: mark.line for key, (mark, _) in found.single.items()}),
            warnings=tuple(found.warnings))
