"""The verdict on a submission tree: each thing that would keep a reviewer from accepting it.

Sources in faults: SR is MLCommons' submission rules, TP its training policies.
"""

import glob
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.code_lines import named_places, source_files, strange_places
from mlperf_rn50.mllog.check.faults import Fault, name_logs
from mlperf_rn50.mllog.check.judge import Judgement
from mlperf_rn50.mllog.check.official import NEEDED, NotInstalled, find_danger
from mlperf_rn50.mllog.check.official_tree import (
    PARAMS,
    RCP_BYPASS,
    CheckResult,
    Remark,
    TreeVerdict,
    is_stray_log,
    judge_tree,
    read_params,
)
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.logged_run import IMAGENET_VAL, Run
from mlperf_rn50.mllog.package.agreement import check_description, is_placeholder
from mlperf_rn50.mllog.package.code import find_commit
from mlperf_rn50.mllog.package.tree_layouts import TreeLayout, layout_of, rule_files
from mlperf_rn50.mllog.read.description import load_object
from mlperf_rn50.mllog.read.reader import read_events
from mlperf_rn50.mllog.rulesets import ROUND_OF, ROUNDS, V05
from mlperf_rn50.text import grouped, some

JudgedRuns = tuple[Sequence[Run], Judgement]
_MAX_WARNINGS = 3  # maximum number of warnings shown per log; `report` shows all
_MAX_NAMES = 3  # maximum number of files and lines named in a fault
_EVAL_PERIOD = 4  # epochs
_UNKNOWN = '<implementation>'  # name of a program whose file is absent
_BASH_S = 10  # time limit for reading a script
_SOURCE_RULE = 'SR Source code requirements for replication'
_WAYS_OUT = (
    'train to more epochs; or, for a batch without reference points, submit them in a pull request '
    f'to mlcommons/logging; or package again with --rcp-bypass REASON, which writes {PARAMS}, and '
    'notify the results chair'
)


def judge_package(home: Path, round_name: str, sets: Mapping[str, JudgedRuns]) -> TreeVerdict:
    """Return the verdict on the systems of a tree, whose runs were judged by the rules of the
    round."""
    layout, ruleset = layout_of(round_name), ROUNDS[round_name]
    faults = [*_link_faults(home), *_tree_faults(home, layout, sets), *_set_faults(home, sets)]
    remarks, results, missing = list[Remark](), list[CheckResult](), list[str]()
    for system, (runs, judgement) in sets.items():
        bypass = RCP_BYPASS in read_params(home, ruleset, system)[0]
        described, empty = check_description(home, system, round_name, runs)
        missing += empty
        place, rule = f'results/{system}/resnet', f'rules of {ROUND_OF[judgement.ruleset or V05]}'
        of_system = [
            Fault(place, '', text, 'TP Reference Convergence Points' if _WAYS_OUT in text else rule)
            for text in refusals_of(judgement, runs, bypass)
        ]
        if data := sorted({r.data_text for r in runs if r.data_text}):
            text = (
                f'got {", ".join(data)}, expected all of ImageNet, also in the open division; run '
                'on it'
            )
            of_system.append(Fault(place, 'dataset', text, 'TP Data State at Start of Run'))
        of_system += [*_run_faults(runs, round_name), *described]
        faults += [
            f if '/' in f.file or len(sets) == 1 else replace(f, file=f'{system}: {f.file}')
            for f in of_system
        ]
        about_runs = find_remarks(runs, judgement)
        if bypass and judgement.convergence:
            text = f'{PARAMS} bypasses this check; notify the results chair'
            about_runs.append(('warning', f'{judgement.convergence}; {text}'))
        remarks += [(grade, f'{system}: {text}') for grade, text in about_runs]
        results.append(('logs', f'{system}: {_summary(runs, judgement)}'))
    official = TreeVerdict(results=[('official tools', 'not run: a log could control them')])
    dangers = [*_dangers(home, ruleset, sets)]
    faults += dangers
    if not dangers and not any(
        r.status == 'unreadable' or find_danger(r.path, ruleset)
        for runs, _ in sets.values()
        for r in runs
    ):
        official = judge_tree(home, ruleset, list(sets))
    faults += _tool_faults(official.faults, sets)
    return replace(
        official,
        faults=_folded(faults),
        results=[*results, *official.results],
        remarks=remarks,
        missing=missing,
    )


def _dangers(home: Path, ruleset: str, sets: Mapping[str, JudgedRuns]) -> Iterator[Fault]:
    """Yield a fault for each file that the official tools would take for a log, that could control
    them, and that is no log of a run of the set, such as one of inference."""
    for system, (runs, _) in sets.items():
        names = {run.path.name for run in runs}
        for path in sorted((home / f'results/{system}/resnet').glob('result_*.txt')):
            if path.name in names or is_stray_log(path) or not path.is_file():
                continue
            try:
                danger = find_danger(path, ruleset)
            except UserError as e:
                danger = str(e)
            if danger:
                yield Fault(
                    str(path.relative_to(home)), '', danger, f'rules of {ROUND_OF[ruleset]}'
                )


def refusals_of(judgement: Judgement, runs: Sequence[Run], bypass: bool = False) -> list[str]:
    """Return the rules that a judged set breaks, without those about its data, and without a
    bypassed check of its epochs. That of too few epochs says what can be done."""
    if judgement.is_unchecked:
        raise NotInstalled(NEEDED)
    data = {r.data_text for r in runs}
    found = [*judgement.violations, *(text for text in judgement.obstacles if text not in data)]
    if bypass:
        found = [text for text in found if text != judgement.convergence]
    return [f'{text}; {_WAYS_OUT}' if text == judgement.convergence else text for text in found]


def _link_faults(home: Path) -> Iterator[Fault]:
    """Yield a fault for each link that leads to nothing elsewhere: an archive has the link only."""
    top = os.path.realpath(home)
    for place, folders, files in os.walk(home):
        for path in (os.path.join(place, name) for name in sorted([*folders, *files])):
            if not os.path.islink(path):
                continue
            is_inside = Path(os.path.realpath(path)).is_relative_to(top)
            if os.path.isabs(os.readlink(path)) or not is_inside or not os.path.exists(path):
                text = 'is a link out of the tree, absolute or broken; replace it with the files'
                yield Fault(os.path.relpath(path, home), '', text, 'SR Directory structure')


def _run_faults(runs: Sequence[Run], round_name: str) -> Iterator[Fault]:
    """Yield faults about caches that were not cleared, images that were not evaluated, and closed
    runs that are not evaluated every four epochs.

    The rules of v0.7 permit more frequent evaluations; those of v0.5 and v0.6 state no period.
    """

    def fault(affected: Sequence[Run], key: str, text: str, rule: str) -> Fault:
        return Fault(name_logs(runs, affected), key, text, rule)

    readable = [r for r in runs if r.status != 'unreadable']
    if uncleared := [r for r in readable if _is_uncleared(r)]:
        text = 'got false, expected true; clear the caches before each run (--clear-caches)'
        yield fault(uncleared, keys.CACHE_CLEAR, text, 'TP Data State at Start of Run')
    imagenet = [r for r in runs if r.is_imagenet]
    if partial := [r for r in imagenet if (r.eval_samples or IMAGENET_VAL) < IMAGENET_VAL]:
        text = f'got {partial[0].eval_samples}, expected {IMAGENET_VAL}, the whole validation set'
        yield fault(partial, keys.EVAL_SAMPLES, text, 'TP Quality measure')
    if round_name == 'v0.6' and (unnamed := [r for r in readable if _has_no_contact(r)]):
        text = 'got no name; set run.submission_poc_name before the runs'
        yield fault(unnamed, keys.SUBMISSION_POC_NAME, text, 'rules of v0.6')
    shortest = 1 if round_name == 'v0.7' else _EVAL_PERIOD
    closed = [r for r in runs if r.division == keys.CLOSED and round_name >= 'v0.7']
    if strange := [r for r in closed if _strange_gap(r, shortest)]:
        first, second = _strange_gap(strange[0], shortest)
        text = (
            f'{strange[0].path.name} has evaluations after epochs {first} and {second}, expected '
            f'every {_EVAL_PERIOD} epochs from epoch 1, 2, 3 or 4 on; set train.eval_period'
        )
        yield fault(strange, keys.EVAL_ACCURACY, text, 'TP Quality measure')


def _is_uncleared(run: Run) -> bool:
    return any(
        event.key == keys.CACHE_CLEAR and event.value is False
        for _, event in read_events(run.path)
        if isinstance(event, LogEvent)
    )


def _has_no_contact(run: Run) -> bool:
    return any(
        event.key == keys.SUBMISSION_POC_NAME and (not event.value or is_placeholder(event.value))
        for _, event in read_events(run.path)
        if isinstance(event, LogEvent)
    )


def _strange_gap(run: Run, shortest: int) -> Sequence[int]:
    """Return the first successive evaluations that are too far apart or, after the first one, too
    near, or (). The first interval begins at epoch 0."""
    epochs = [0, *(e.epoch for e in run.evaluations)]
    for first, second in zip(epochs, epochs[1:]):
        if not (shortest if first else 1) <= second - first <= _EVAL_PERIOD:
            return first, second
    return ()


def _tree_faults(home: Path, layout: TreeLayout, sets: Mapping[str, JudgedRuns]) -> list[Fault]:
    """Return faults about the code and the files that the rules require."""
    code = '/'.join(Path(layout.code).parts[:2])
    files = source_files(home / code)
    if not files:
        text = 'is absent; submit the code that ran'
        return [Fault(code, '', text, _SOURCE_RULE)]
    faults = list[Fault]()
    for system, (runs, _) in sets.items():
        readable = [r.path for r in runs if r.status != 'unreadable']
        if strange := strange_places(named_places(readable), files):
            names = [f'{Path(file).name}:{line}' for file, line in strange]
            text = (
                f'{len(strange)} lines of source that the logs name are no calls in {code} '
                f'({some(names, _MAX_NAMES)}); submit the code that ran'
            )
            faults.append(Fault(f'results/{system}/resnet', '', text, _SOURCE_RULE))
        faults += _file_faults(home, layout, system)
        faults += _commit_faults(home, layout.of(system, '').folder)
    return faults


def _set_faults(home: Path, sets: Mapping[str, JudgedRuns]) -> Iterator[Fault]:
    for folder in sorted(home.glob('results/*/resnet')):
        if folder.parent.name not in sets:
            place = str(folder.relative_to(home))
            text = 'contains no log of ResNet; add the five logs, or remove the folder'
            yield Fault(place, '', text, 'TP Benchmark Results')
    for path in sorted(home.glob('results/*/resnet/result_*.txt')):
        if is_stray_log(path):
            text = 'is not named as a log, expected result_<k>.txt; rename or remove it'
            yield Fault(str(path.relative_to(home)), '', text, 'TP Benchmark Results')


def _file_faults(home: Path, layout: TreeLayout, system: str) -> Iterator[Fault]:
    """Yield faults about files that are absent, and scripts that bash cannot read."""
    found = {
        Path(name): [p for p in home.glob(pattern) if p.is_file()]
        for name, pattern in zip(
            rule_files(layout, system, _UNKNOWN), rule_files(layout, glob.escape(system), '*')
        )
    }
    absent = [name for name, files in found.items() if not files]
    for place, names in grouped(absent, lambda name: str(name.parent)).items():
        # equal for all systems
        shown = [n.name.replace(f'{system}_{_UNKNOWN}', f'<system>_{_UNKNOWN}') for n in names]
        yield Fault(place, '', f'lacks {", ".join(shown)}', 'SR Directory structure')
    for name, files in found.items():
        if name.suffix == '.sh' and files and (error := _bash_error(files[0])):
            yield Fault(str(name), '', f'bash cannot read it: {error}', 'SR Directory structure')


def _bash_error(script: Path) -> str:
    """Return the first error of a script that bash reads without running it, or ''."""
    command = ['bash', '-n', str(script.resolve())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BASH_S
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return type(e).__name__
    first = done.stderr.decode('utf-8', 'replace').partition('\n')[0]
    return first.replace(f'{command[-1]}: ', '')[:200] if done.returncode else ''


def _commit_faults(home: Path, folder: str) -> Iterator[Fault]:
    """Yield faults if the environments beside a system's scripts do not name one commit."""
    envs = {}
    for path in sorted((home / folder).glob('env_*.json')):
        with suppress(ValueError):
            envs[path.name] = load_object(path)[0]
    if envs and (refusal := find_commit(envs)[1]):
        yield Fault(f'{folder}/env_*.json', 'git_commit', refusal, _SOURCE_RULE)


def _tool_faults(found: Iterable[Fault], sets: Mapping[str, JudgedRuns]) -> Iterator[Fault]:
    """Yield the errors of the official tools, except a failed check of the epochs that was stated
    in full."""
    stated = {
        f'results/{system}/resnet' for system, (_, judged) in sets.items() if judged.convergence
    }
    for fault in found:
        if not fault.text.startswith('RCP Test Failed'):
            yield fault
        elif fault.file not in stated:
            yield replace(fault, text=f'{fault.text}; {_WAYS_OUT}')


def _folded(faults: Iterable[Fault]) -> list[Fault]:
    """Return each kind of fault once, with its files."""
    groups = grouped(dict.fromkeys(faults), lambda f: (f.key, f.text, f.rule))
    return [
        replace(first, file=some([f.file for f in (first, *others)], _MAX_NAMES))
        for first, *others in groups.values()
    ]


def _summary(runs: Sequence[Run], judgement: Judgement) -> str:
    text = (
        f'{len(runs) - len(judgement.misses)} of {len(runs)} pass the rules of '
        f'{ROUND_OF[judgement.ruleset or V05]}'
    )
    return f'{text}; one may fail' if judgement.misses else text


def find_remarks(runs: Sequence[Run], judgement: Judgement) -> list[Remark]:
    """Return remarks about an accepted set: a failed run, and the findings of any grade about its
    logs."""
    found = [
        (
            'warning',
            f'1 of {len(runs)} runs did not converge ({path.name}: {reason}) and counts as the '
            'slowest',
        )
        for path, reason in judgement.misses.items()
    ]
    counts = Counter(text for r in runs for text in {w.text for w in r.findings})
    findings = (w for r in runs for w in r.findings)
    shared = {w.text: w.grade for w in findings if counts[w.text] == len(runs) > 1}
    found += [(grade, f'all {len(runs)} logs: {text}') for text, grade in shared.items()]
    for run in runs:
        rest = [w for w in run.findings if w.text not in shared]
        for w in rest[:_MAX_WARNINGS]:
            place = run.path.name if w.line is None else f'{run.path.name}:{w.line}'
            found.append((w.grade, f'{place}: {w.text}'))
        if len(rest) > _MAX_WARNINGS:
            text = (
                f'{run.path.name}: {len(rest) - _MAX_WARNINGS} more findings; mlperf-rn50 report '
                '--findings shows them'
            )
            found.append(('note', text))
    remarks = [('note' if grade == 'note' else 'warning', text) for grade, text in found]
    return sorted(remarks, reverse=True, key=lambda remark: remark[0])  # warnings first
