"""The rules' own checkers, run on a log and explained.

0.6.0 and later: mlperf-logging's compliance checker, in this process. v0.5: the two levels of that round,
whose checker is no longer published. The official checker builds file names from values of the log and
evaluates the files it finds, so those values are checked first.
"""
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf import events
from mlperf_rn50.mlperf.events import Event
from mlperf_rn50.mlperf.reader import read_events
from mlperf_rn50.mlperf.rulesets import DIVISIONS, RULESETS, V05

_V05_LEVEL2 = ('run_clear_caches', 'train_loop', 'train_epoch', 'opt_learning_rate', 'eval_start', 'eval_size',
               'eval_target', 'eval_accuracy', 'eval_stop', 'eval_offset', 'model_hp_initial_max_pool',
               'model_hp_begin_block', 'model_hp_end_block', 'model_hp_block_type', 'model_hp_projection_shortcut',
               'model_hp_shorcut_add', 'model_hp_resnet_topology')
# What the official checker puts into file names, and what it may be.
_ENQUEUED = {'submission_benchmark': ('resnet',), 'submission_division': DIVISIONS, 'opt_name': ('sgd', 'lars')}


@dataclass(frozen=True)
class Verdict:
    """What one ruleset says of one log.

    Args:
        ruleset: one of RULESETS.
        division: open or closed.
        violations: one sentence each; none where the log passes.
    """

    ruleset: str
    division: str
    violations: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass(frozen=True)
class LogFacts:
    """What a log says of itself that no checker looks at.

    Args:
        formats: line formats found.
        division: logged, None where it is not.
        dataset: logged data set, None where it is not.
        is_imagenet: whether it is; published logs without a data set count as ImageNet.
        num_resumes: how often the run was resumed.
        best_top1: best accuracy logged, None without an evaluation.
        torn: lines that start like a log line and are none, as 'line N: why'.
    """

    formats: frozenset[str]
    division: str | None
    dataset: str | None
    is_imagenet: bool
    num_resumes: int
    best_top1: float | None
    torn: tuple[str, ...]


def _accuracy(event: Event) -> float | None:
    value = event.value.get('value') if isinstance(event.value, dict) else event.value
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def find_facts(path: Path) -> LogFacts:
    """The facts of a log file.

    Raises:
        UserError: the file cannot be read.
    """
    formats, torn, accuracies = set(), [], []
    division, dataset, is_imagenet, num_resumes = None, None, True, 0
    for number, event in read_events(path):
        if isinstance(event, ValueError):
            torn.append(f'line {number}: {event}')
            continue
        formats.add(event.line_format)
        if event.key == 'submission_division' and event.value in DIVISIONS:
            division = event.value
        elif event.key == events.DATASET:
            dataset, is_imagenet = str(event.value), event.metadata.get('is_imagenet') is True
        elif event.key == events.RUN_RESUMED:
            num_resumes += 1
        elif event.key == 'eval_accuracy':
            accuracies.append(_accuracy(event))
    known = [a for a in accuracies if a is not None]
    return LogFacts(frozenset(formats), division, dataset, is_imagenet, num_resumes, max(known, default=None),
                    tuple(torn))


def check_v05(path: Path) -> tuple[str, ...]:
    """Violations of the v0.5 rules, levels 1 and 2, and of its quality target.

    Source: MLPerf training v0.5 compliance rules.
    """
    found = [e for _, e in read_events(path) if isinstance(e, Event) and e.line_format == 'MLPv0.5.0']
    if not found:
        return ('there is no :::MLPv0.5.0 line',)
    violations = []
    counts = Counter(e.key for e in found)
    for key in ('run_start', 'run_stop', 'run_final'):
        if counts[key] != 1:
            violations.append(f'level 1: {key} stands {counts[key]} times, expected once')
    ends = [e.key for e in found if e.key in ('run_start', 'run_stop', 'run_final')]
    if not violations and ends != ['run_start', 'run_stop', 'run_final']:
        violations.append(f'level 1: the order is {", ".join(ends)}, expected run_start, run_stop, run_final')
    if not counts['eval_start'] and not counts['eval_stop']:
        violations.append('level 1: there is neither eval_start nor eval_stop')
    evaluations = [e for e in found if e.key == 'eval_accuracy']
    for e in evaluations:
        if not (isinstance(e.value, dict) and {'epoch', 'value'} <= set(e.value)) or _accuracy(e) is None:
            violations.append(f'level 1: eval_accuracy is {e.value!r}, expected {{"epoch": e, "value": v}}')
    violations += [f'level 2: {key} is missing' for key in _V05_LEVEL2 if not counts[key]]
    return tuple(violations + _v05_target(found, evaluations))


def _v05_target(found: list[Event], evaluations: list[Event]) -> list[str]:
    """The violation of a run that did not reach the target it logged."""
    targets = [e.value for e in found if e.key == 'eval_target' and isinstance(e.value, (int, float))]
    accuracies = [a for a in map(_accuracy, evaluations) if a is not None]
    if not targets or not accuracies:
        return [] if accuracies else ['level 1: eval_accuracy is missing']
    if max(accuracies) < targets[0]:
        return [f'the target was missed: best accuracy {max(accuracies):.5f}, expected at least {targets[0]}']
    return []


def _find_danger(lines: list) -> str | None:
    """What of parsed lines must not reach the official checker, as it would steer it; None where nothing does."""
    for line in lines:
        if not isinstance(line.value, dict) or not isinstance(line.value.get('metadata'), dict):
            return f'{line.key}: its value or metadata is missing'
        allowed = _ENQUEUED.get(line.key)
        if allowed and line.value.get('value') not in allowed:
            return f'{line.key}: got {line.value.get("value")!r:.200}, expected {" or ".join(allowed)}'
    return None


def find_danger(path: Path, ruleset: str) -> str | None:
    """What of a log must not reach any official tool; None where nothing does."""
    from mlperf_logging.compliance_checker import mlp_parser
    return _find_danger(mlp_parser.parse_file(str(path), ruleset=ruleset)[0])


def check_official(path: Path, ruleset: str, division: str | None) -> tuple[str, ...]:
    """What the official compliance checker says of a log, one sentence per violation.

    Args:
        path: the log.
        ruleset: 0.6.0 to 4.0.0.
        division: check as if this one had been logged; None takes the logged one.
    """
    from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
    lines, errors = mlp_parser.parse_file(str(path), ruleset=ruleset)
    if not lines and not errors:
        return (f'there is no {":::MLL" if ruleset == "0.6.0" else ":::MLLOG"} line',)
    if errors:
        return tuple(f'not a log line of {ruleset} ({why}): {line[:80]}' for line, why in errors)
    if danger := _find_danger(lines):
        return (danger,)
    for line in lines:
        if line.key == 'submission_division' and division:
            line.value['value'] = division
    checker = mlp_compliance.make_checker('training', ruleset, quiet=True, werror=False)
    logging.disable(logging.CRITICAL)
    try:
        mlp_compliance.enqueued_configs.clear()
        checker.check_loglines(lines, f'training_{ruleset}/common.yaml')
    finally:
        logging.disable(logging.NOTSET)
    messages = [*checker.overwritable.values(), *checker.not_overwritable]
    return tuple(_explain(str(m), lines) for m in messages)


def _explain(message: str, lines: list) -> str:
    """An official message as a person would say it."""
    if m := re.match(r"Required EXACTLY_ONE occurrence of '(\w+)' but found (\d+)", message):
        return f'{m[1]} stands {m[2]} times, expected once'
    if m := re.match(r"Required AT_LEAST_ONE occurrence of (.+?)(?: but found 0)?$", message):
        return f'{m[1]} is missing'.replace("'", '')
    if m := re.match(r"CHECK for '(\w+)' failed in line \d+:\n(.*)\nfailed test: (.+)", message):
        values = [line.value for line in lines if line.full_string == m[2]]
        got = f'{values[0]["value"]!r}, {values[0]["metadata"]}' if values else m[2][:80]
        return f'{m[1]}: got {got}, which fails the test {_plain(m[3])}'
    if m := re.match(r'Failed checks for (\w+) : (.+)', message):
        best = [a for line in lines if line.key == m[1] and (a := line.value['value']) is not None]
        hint = f'; the best is {max(best)}' if best and all(isinstance(a, (int, float)) for a in best) else ''
        return f'{m[1]}: no line passes the test {_plain(m[2])}{hint}'
    if "s['sgd_decay']" in message:
        return ('optimizer keys: expected opt_learning_rate_decay_boundary_epochs for sgd, or the decay steps, decay '
                'power, weight decay and epsilon of lars, and none of the other')
    if 'initialized_tensors' in message:
        return 'weights_initialization: the tensors are not exactly those of ResNet-50 as the rules name them'
    return ' '.join(message.split('\ncurrent context')[0].split())[:200]


def _plain(test: str) -> str:
    return re.sub(r"v\['(value|metadata)'\]", r'\1', test.strip())


def check_log(path: Path, rulesets: tuple[str, ...], division: str | None) -> list[Verdict]:
    """What each ruleset says of a log, as the logged division or another.

    Raises:
        UserError: the file cannot be read or holds no log line at all.
    """
    facts = find_facts(path)
    if not facts.formats:
        raise UserError(f'{path}: no MLPerf log line in it; expected a result_<k>.txt')
    claimed = division or facts.division or 'open'
    torn = tuple(f'torn line, {t}' for t in facts.torn)
    return [Verdict(r, claimed, torn + (check_v05(path) if r == V05 else check_official(path, r, division)))
            for r in rulesets]


def applicable_rulesets(facts: LogFacts) -> tuple[str, ...]:
    """The rulesets whose line format a log holds."""
    result: list[str] = []
    if 'MLPv0.5.0' in facts.formats:
        result.append(V05)
    if 'MLL' in facts.formats:
        result.append('0.6.0')
    if 'MLLOG' in facts.formats:
        result += RULESETS[2:]
    return tuple(result)


def render_verdicts(path: Path, facts: LogFacts, verdicts: list[Verdict]) -> str:
    """Verdicts as text, and what the log can claim."""
    lines = [str(path)]
    for v in verdicts:
        level = ', levels 1 and 2' if v.ruleset == V05 else ''
        lines.append(f'  {v.ruleset:6s} {v.division:6s} {"pass" + level if v.passed else "FAIL"}')
        lines += [f'         - {text}' for text in v.violations]
    passed = ', '.join(f'{v.ruleset} {v.division}' for v in verdicts if v.passed) or 'nothing'
    lines.append(f'  can claim: {passed}')
    if not facts.is_imagenet:
        lines.append(f'  but: the data set is {facts.dataset}, not ImageNet: this is a check of the format only, '
                     'not a result that can be submitted')
    if facts.num_resumes:
        lines.append(f'  but: the run was resumed {facts.num_resumes} times; a log that spans a resume '
                     'cannot be submitted')
    return '\n'.join(map(events.printable, lines))
