"""A submission tree: the order, the rules on a set of runs, and the tree of those that keep them.

Source: MLPerf training submission rules; the layouts of v0.5 and of later rounds.
"""
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import dump_json
from mlperf_rn50.mlperf import check
from mlperf_rn50.mlperf.check_tree import Finding, check_tree, summarize
from mlperf_rn50.mlperf.describe_system import data_note, describe_entry, describe_system
from mlperf_rn50.mlperf.description import load_env
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.redact import hosts_of, redact
from mlperf_rn50.mlperf.rulesets import ROUNDS
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.submitted_code import copy_code, write_runs, write_scripts

NUM_RESULTS = 5
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}')


@dataclass(frozen=True)
class Order:
    """What is to be packaged.

    Args:
        org: who submits.
        system: name of the system, of its folder and of its description.
        round: v0.5 to v4.0, one of ROUNDS.
        out: the folder that holds the tree of the organisation.
        poc_email: v0.5 only: whom to ask.
        is_redacted: whether host names and paths are left out of what is taken from env.json and config.yaml.
    """

    org: str
    system: str
    round: str
    out: Path
    poc_email: str = ''
    is_redacted: bool = False

    @property
    def ruleset(self) -> str:
        return ROUNDS[self.round]

    @property
    def home(self) -> Path:
        return self.out / self.org


@dataclass(frozen=True)
class Package:
    """What became of an order.

    Args:
        home: the tree; None where a rule refused it and nothing was written.
        refusals: the rules against it, a sentence each.
        findings: what the checkers say of an accepted one.
        notes: what to know of it.
    """

    home: Path | None
    refusals: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def check_order(order: Order) -> None:
    """Names that are to become folders.

    Raises:
        UserError: a name cannot be one, or is taken.
    """
    for option, name in (('--org', order.org), ('--system', order.system)):
        if not _NAME.fullmatch(name):
            raise UserError(f'{option}: got {name!r:.100}, expected letters, digits, ., _ and -, and no . or - first')
    taken = order.home / 'results' / order.system
    if taken.exists():
        raise UserError(f'{taken}: is there already and is not overwritten; choose another --system or --out')


def _result_of(run: Run, order: Order) -> Path:
    """The file of a run that the round's rules can read."""
    return run.path.with_name(f'{run.path.stem}_v0.6.txt') if order.round == 'v0.6' else run.path


def check_set(runs: Sequence[Run], order: Order) -> list[str]:
    """The rules that a set breaks, whatever its single logs say; a sentence each."""
    refusals = []
    if len(runs) != NUM_RESULTS:
        refusals.append(f'a ResNet result is {NUM_RESULTS} runs; here are {len(runs)}')
    failed = [r for r in runs if r.status != 'converged']
    if len(failed) > 1:
        refusals.append(f'one run of five may fail; here {len(failed)} did: '
                        + ', '.join(f'{r.path.name} ({r.status})' for r in failed))
    refusals += [f'{r.path.name}: a log that spans a resume is not that of one timed run'
                 for r in runs if r.num_resumes]
    divisions = sorted({str(r.division) for r in runs if r.status != 'unreadable'})
    if len(divisions) > 1:
        refusals.append(f'a set has one division; the logs name {", ".join(divisions)}')
    if 'closed' in divisions and not all(r.is_imagenet for r in runs):
        refusals.append('the closed division trains on ImageNet; these logs are of other data')
    seeds = [r.seed for r in runs if r.seed is not None]
    if len(set(seeds)) < len(seeds):
        refusals.append('every run has a seed of its own; here some share one')
    if order.round == 'v0.6':
        refusals += [f'{_result_of(r, order).name} is missing: the 0.6.0 rules read :::MLL lines only; run with '
                     '--run.log_v06 true' for r in runs if not _result_of(r, order).is_file()]
    return refusals


def check_results(runs: Sequence[Run], order: Order) -> tuple[list[str], Finding]:
    """What the round's checker has against the logs, where more than the one that may fail do; how many pass.

    A log that could steer the official tools is refused whatever the others are.
    """
    if order.ruleset != check.V05:
        dangers = [(r, check.find_danger(_result_of(r, order), order.ruleset)) for r in runs]
        if any(danger for _, danger in dangers):
            return [f'{r.path.name}: {danger}' for r, danger in dangers if danger], ('logs', 'not checked')
    verdicts = [(r, check.check_log(_result_of(r, order), (order.ruleset,), None)[0]) for r in runs
                if r.status != 'unreadable']
    failed = [(r, v) for r, v in verdicts if not v.passed]
    good = len(verdicts) - len(failed)
    tolerated = '; one may fail' if good < len(runs) else ''
    finding = 'logs', f'{good} of {len(runs)} pass the rules of {order.ruleset}{tolerated}'
    violations = [f'{r.path.name}: {text}' for r, v in failed for text in v.violations]
    return violations if len(runs) - good > 1 else [], finding


def _env_of(runs: Sequence[Run]) -> dict[str, Any]:
    return next((env for r in runs if (env := load_env(r.path))), {})


def _code_folder(order: Order) -> str:
    return 'code/resnet' if order.round == 'v0.5' else 'benchmarks/resnet/implementations/mlperf_rn50'


def _write_tree(home: Path, runs: Sequence[Run], order: Order) -> list[str]:
    """The tree of one system; returns notes."""
    env = _env_of(runs)
    description = describe_system(runs, env, order.org, order.system, order.round)
    if order.is_redacted:
        description = redact(description, hosts_of(env))
    results = home / 'results' / order.system / 'resnet'
    results.mkdir(parents=True)
    for k, run in enumerate(runs):
        shutil.copyfile(_result_of(run, order), results / f'result_{k}.txt')
    if order.round == 'v0.5':
        dump_json(results.parent / 'entry.json', describe_entry(description))
        dump_json(home / 'submission.json', {'org': order.org, 'poc_email': order.poc_email})
    else:
        dump_json(home / 'systems' / f'{order.system}.json', description)
    code = home / _code_folder(order)
    code.mkdir(parents=True)
    write_scripts(code, runs, order.system)
    write_runs(code / f'runs_{order.system}', runs, order.is_redacted)
    notes = [copy_code(code / 'code', env), data_note(runs)]
    irrelevant = ('hw_notes', 'sw_notes', 'accelerator_' if description['accelerators_per_node'] == '0' else 'sw_notes')
    empty = [k for k, v in description.items() if v in ('', {}) and not k.startswith(irrelevant)]
    if empty:
        notes.append(f'the machine does not say: {", ".join(empty)}; fill them in by hand')
    orgs = sorted({str(r.org) for r in runs if r.org} - {order.org})
    if orgs:
        notes.append(f'the logs say submission_org {", ".join(orgs)}, not {order.org}; results are never changed')
    return [n for n in notes if n]


def _merge(source: Path, target: Path) -> None:
    """Moves the tree of one system into that of its organisation, results last; what is there stays as it is."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda p: (p.name == 'results', p.name)):
        place = target / path.name
        if not place.exists():
            path.rename(place)
        elif path.is_dir():
            _merge(path, place)


def make_package(runs: Sequence[Run], order: Order) -> Package:
    """Builds the tree and has it checked; a set that a rule refuses leaves nothing behind.

    Raises:
        UserError: a name is taken or cannot be a folder's, or the folder cannot be written.
    """
    check_order(order)
    refusals = check_set(runs, order)
    if refusals:
        return Package(None, tuple(refusals))
    refusals, of_logs = check_results(runs, order)
    if refusals:
        return Package(None, tuple(refusals))
    try:
        order.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=order.out, prefix='.package-') as place:
            new = Path(place) / order.org
            notes = _write_tree(new, runs, order)
            refusals, findings = check_tree(new, order.ruleset)
            if refusals:
                return Package(None, tuple(refusals), notes=tuple(notes))
            if (order.home / _code_folder(order) / 'code').exists():
                notes.append(f'{_code_folder(order)}/code is there already and stays as it is')
            _merge(new, order.home)
    except OSError as e:
        raise UserError(f'--out: {order.out}: {e.strerror}; choose a folder that can be written') from e
    score = summarize(order.home, order.system, order.ruleset)
    findings.append(('result_summarizer', 'gives no score' if score is None else f'{score:.2f} min'))
    return Package(order.home, (), (of_logs, *findings), tuple(notes))


def render_package(package: Package, order: Order, score_minutes: float | None) -> str:
    """What was made, what the official tools say of it, and what to know; or why it was refused."""
    lines = []
    if package.home is None:
        lines.append(f'refused by the rules of {order.round}; nothing was written:')
        lines += [f'  - {text}' for text in package.refusals]
    else:
        ours = 'none' if score_minutes is None else f'{score_minutes:.2f} min'
        lines.append(f'{package.home}: {order.system}, {order.round}')
        lines += [f'  {name:19s} {text}' for name, text in (*package.findings, ('score here', ours))]
    lines += [f'  mind: {text}' for text in package.notes]
    return '\n'.join(map(printable, lines))
