"""Submission trees: rules for a run set, construction of the tree, and checks of a finished tree.

Source: MLPerf training submission rules.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

import mlperf_rn50
from mlperf_rn50.answer import Answer, Cell, Table
from mlperf_rn50.config_file import load_tree
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, UserError
from mlperf_rn50.files import dump_json, refuse_existing, write_atomically, writing_folder
from mlperf_rn50.mllog.check.judge import Judgement
from mlperf_rn50.mllog.check.official_tree import PARAMS, RCP_BYPASS, TreeVerdict
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package import system_desc
from mlperf_rn50.mllog.package.code import (
    accepted_keys,
    check_commit,
    check_configs,
    code_name,
    copy_code,
    find_commit,
    find_flaws,
    sources_of,
)
from mlperf_rn50.mllog.package.readme import write_system
from mlperf_rn50.mllog.package.redact import check_logs, find_site, public_config, public_env
from mlperf_rn50.mllog.package.tree_layouts import PROGRAM, TreeLayout, layout_of
from mlperf_rn50.mllog.package.tree_verdict import (
    judge_package,
    refusals_of,
)
from mlperf_rn50.mllog.read.description import load_env
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.runfolder.outputs import list_files, refuse_changed
from mlperf_rn50.text import plural, printable, some

_SAME_SCORE_MINUTES = 0.005  # a smaller difference disappears in rounding
CHECKOUT = Path(mlperf_rn50.__file__).parent.parent
# files of each run, and those whose names depend on the program or on an option
_WRITTEN = re.compile(
    rf'^(result|config|env)_\d+\.(txt|yaml|json)$|{PROGRAM}-[0-9a-f]{{8}}|^{PARAMS}$'
)
_PROGRAM = re.compile(rf'{PROGRAM}-[0-9a-f]{{8}}')
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._+-]{0,99}')


@dataclass(frozen=True)
class Order:
    org: str
    system: str
    round: str
    out: Path  # parent of the organisation's tree
    code: Path = CHECKOUT  # checkout to submit, by default that of the running program
    poc_email: str = ''  # address of the contact, which v0.5 requires
    is_replacing: bool = False  # the system's files may exist, and are replaced
    rcp_bypass: str = ''  # why the official check of the epochs is bypassed
    given: Mapping[str, Any] = field(default_factory=dict)  # fields from a submitter

    @property
    def tree(self) -> Path:
        """Path of the tree in the folder out."""
        return Path(self.org, layout_of(self.round).root.format(system=self.system))

    @property
    def home(self) -> Path:
        return self.out / self.tree


@dataclass(frozen=True)
class Package:
    """Result of building the tree of an Order, or of checking a finished tree."""

    round: str
    home: Path | None  # the tree; None if it was refused and not written
    refusals: Sequence[str] = ()  # violated rules
    notes: Sequence[str] = ()
    verdict: TreeVerdict = TreeVerdict()

    @property
    def ready(self) -> bool:
        return not (self.refusals or self.verdict.faults)

    @property
    def official_score_minutes(self) -> float | None:
        """Score from result_summarizer, None for a tree with several systems."""
        scores = [*self.verdict.scores.values()]
        return scores[0] if len(scores) == 1 else None


def _check_order(order: Order) -> None:
    """Raise UserError unless the names are valid and unused, and the code is complete."""
    for option, name in (('--org', order.org), ('--system', order.system)):
        if not _NAME.fullmatch(name):
            raise UserError(
                f'{option}: got {name!r:.100}, expected a letter or digit, then letters, digits, . '
                '_ + -'
            )
    if layout_of(order.round).contact and not order.poc_email:
        raise UserError(
            f'--poc-email: missing, but {order.round} requires the address of a contact'
        )
    for path in _own_paths(layout_of(order.round).of(order.system, '')):
        if os.path.lexists(order.home / path) and not order.is_replacing:
            raise UserError(
                f'{order.home / path}: exists and is not overwritten; change --system or --out, or '
                'give --replace'
            )


def _own_paths(paths: TreeLayout) -> tuple[str, ...]:
    """Return the files and folders of one system, results first."""
    own = (paths.results, paths.description, paths.folder, paths.contact)
    return tuple(path for path in own if path)


def _files_of(home: Path, paths: TreeLayout) -> list[Path]:
    """Return the files of a system in a tree, without those of the program."""
    own = [home / path for path in _own_paths(paths)]
    found = [file for path in own for file in (path, *sorted(path.rglob('*')))]
    return [file for file in found if file.is_file() and home / paths.code not in file.parents]


def _write_tree(home: Path, runs: Sequence[Run], order: Order, commit: str) -> list[str]:
    """Write the submission tree of a system. Return notes for the user."""
    paths = layout_of(order.round).of(order.system, code_name(commit))
    env = next((env for r in runs if (env := load_env(r.path))), {})
    base = next((b for r in runs if (b := system_desc.find_base(r.path, order.round))), None)
    described = system_desc.describe(
        runs,
        env,
        org=order.org,
        system=order.system,
        round_name=order.round,
        given=order.given,
        base=base,
    )
    site = find_site(runs)
    results, folder = home / paths.results, home / paths.folder
    results.mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    for k, run in enumerate(runs):
        shutil.copyfile(run.path, results / f'result_{k}.txt')
        config = public_config(load_tree(run_of(run.path).config), site)
        write_atomically(folder / f'config_{k}.yaml', yaml.safe_dump(config, sort_keys=False))
        dump_json(folder / f'env_{k}.json', public_env(load_env(run.path), site))
    dump_json(home / paths.description, described.fields)
    if paths.contact:
        dump_json(home / paths.contact, {'org': order.org, 'poc_email': order.poc_email})
    sources = sources_of(home / paths.code)
    write_system(home, paths, runs, described.fields, public_env(env, site), sources)
    if order.rcp_bypass:
        (results / PARAMS).write_text(RCP_BYPASS)  # the official reader accepts no newline
        text = printable(' '.join(order.rcp_bypass.split()))
        with open(folder / paths.readme, 'a') as f:
            f.write(
                f'\n## Reference convergence points\n\nThe check is bypassed ({PARAMS}): {text}\n'
            )
    return [n for n in (*described.notes, system_desc.data_note(runs)) if n]


def _merge(source: Path, target: Path) -> None:
    """Merge a system's tree into its organisation's tree, results last. Existing files are not
    changed."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda p: (p.name == 'results', p.name)):
        place = target / path.name
        if not os.path.lexists(place):
            path.rename(place)
        elif path.is_dir():
            _merge(path, place)


def _refuse_foreign(home: Path, new: Path, paths: TreeLayout) -> None:
    """Raise UserError for a file that package did not write in the folders that it replaces."""
    of_program = {p.name for p in (new / paths.code).iterdir()}
    for folder in (paths.results, paths.folder):
        known = {p.name for p in (new / folder).iterdir()}
        for path in sorted((home / folder).rglob('*')):
            first, *inner = path.relative_to(home / folder).parts
            is_known = first in known or bool(_WRITTEN.search(first))
            if inner and _PROGRAM.fullmatch(first):  # v0.5 has programs in this folder
                is_known = inner[0] in of_program
            if not is_known:
                raise UserError(f'--replace: {path} is no file of package; move it out of the tree')


def _refuse_lost(order: Order, paths: TreeLayout) -> None:
    """Raise UserError for changes of a user in a program in the folders that are replaced, as in
    v0.5."""
    for path in sorted((order.home / paths.folder).glob(f'{PROGRAM}-????????')):
        if others := _added(path, order.code):
            raise UserError(
                f'--replace: {path}: {some(others, 5)} in it would be lost; move it out of the tree'
            )


def _refuse_changed(home: Path, new: Path, code: str) -> None:
    """Raise UserError if a file of the program in a tree, which is kept, is absent or changed."""
    for path in sorted((new / code).rglob('*')) if (home / code).is_dir() else ():
        kept = home / path.relative_to(new)
        is_equal = kept.is_file() and kept.read_bytes() == path.read_bytes()
        if path.is_file() and not is_equal:
            raise UserError(
                f'--out: {kept}: absent or changed since an earlier package; remove {home / code}, '
                'which is then written again'
            )


def _swap(home: Path, new: Path, paths: TreeLayout, old: Path) -> None:
    """Replace the files of a system in a tree by new ones. If that fails, the tree has its old
    files again.

    Results are moved out first and in last, so that they never stand beside files of another
    version.
    """
    moved = [name for name in _own_paths(paths) if os.path.lexists(home / name)]
    try:
        for name in moved:
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).rename(old / name)
        _merge(new, home)
    except BaseException:
        for name in reversed([name for name in moved if os.path.lexists(old / name)]):
            if os.path.lexists(home / name):  # files of the new version
                os.replace(home / name, new / f'failed-{Path(name).name}')
            os.replace(old / name, home / name)
        raise


def _is_copy(path: Path, original: Path) -> bool:
    if path.is_symlink() or original.is_symlink():
        return False
    if path.is_dir():
        return original.is_dir()
    return original.is_file() and path.read_bytes() == original.read_bytes()


def _added(program: Path, checkout: Path) -> list[str]:
    """Return the paths in a program of a tree that are not those of its commit, or were changed;
    all paths if its commit is unknown."""
    with tempfile.TemporaryDirectory() as place:
        original = Path(place)
        with suppress(ValueError, UserError):
            copy_code(original, checkout, program.name.rpartition('-')[2])
        paths = (p.relative_to(program) for p in sorted(program.rglob('*')))
        own = (p for p in paths if '__pycache__' not in p.parts)
        return [str(p) for p in own if not _is_copy(program / p, original / p)]


def _remove_unused(home: Path, layout: TreeLayout, kept: str, checkout: Path) -> list[str]:
    """Remove the programs that no system of a tree uses any more; return notes on those that are
    kept, because a user prepared data or packages in them, or changed them."""
    notes = []
    for path in sorted((home / layout.code).parent.glob(f'{PROGRAM}-????????')):
        users = layout.of('*', path.name)
        is_used = users.uses and any(home.glob(f'{users.folder}/{users.uses}'))
        if path.name == kept or is_used or not path.is_dir() or path.is_symlink():
            continue
        if others := _added(path, checkout):
            notes.append(f'{path}: unused, but not removed, because of {some(others, 5)} in it')
        else:
            shutil.rmtree(path)
    return notes


def make_package(runs: Sequence[Run], judgement: Judgement, order: Order) -> Package:
    """Build and check a tree. Discard it if it breaks a rule. Raise UserError for invalid names or
    folders."""
    _check_order(order)
    notes = []
    if order.rcp_bypass and not judgement.convergence:
        order = replace(order, rcp_bypass='')
        notes = ['--rcp-bypass: not needed, and not written']
    commit, refusal = find_commit({r.path.name: load_env(r.path) for r in runs})
    refusals = refusals_of(judgement, runs, bool(order.rcp_bypass)) or [
        *(check_commit(order.code, commit) if commit else [refusal]),
        *(f for run in runs for f in find_flaws(run)),
    ]
    refusals = refusals or list(map(str, check_logs(runs, find_site(runs))))
    if refusals:
        return Package(order.round, None, list(dict.fromkeys(refusals)))
    with (
        writing_folder(order.out),
        folder_lock(order.out, '--out', OUTPUT_LOCK),
        tempfile.TemporaryDirectory(dir=order.out, prefix='.package-') as place,
    ):
        paths = layout_of(order.round).of(order.system, code_name(commit))
        new_out = Path(place, 'new')
        new = new_out / order.tree
        copy_code(new / paths.code, order.code, commit)
        if flaws := check_configs(runs, accepted_keys(sources_of(new / paths.code))):
            return Package(order.round, None, flaws)
        notes += _write_tree(new, runs, order, commit)
        verdict = judge_package(new, order.round, {order.system: (runs, judgement)})
        refuse_existing(
            path
            for p in new.rglob('*')
            if p.is_dir()
            and ((path := order.home / p.relative_to(new)).is_symlink() or not path.is_dir())
        )
        _refuse_changed(order.home, new, paths.code)
        if order.is_replacing:
            _refuse_foreign(order.home, new, paths)
            _refuse_lost(order, paths)
            refuse_changed(order.out, _files_of(order.home, paths))
        list_files(order.out, new_out, _files_of(new, paths))
        if order.is_replacing:
            _swap(order.home, new, paths, Path(place, 'old'))
            layout = layout_of(order.round)
            notes += _remove_unused(order.home, layout, code_name(commit), order.code)
        else:
            _merge(new, order.home)
    return Package(order.round, order.home, notes=notes, verdict=verdict)


def package_answer(package: Package, heading: str, score_minutes: float | None) -> Answer:
    """Return a package as an answer. score_minutes is the score that `report` computes."""
    verdict, score = package.verdict, score_minutes
    errors = [*package.refusals, *map(str, verdict.faults)]
    doubts = _compare(package, score)
    notes = [*package.notes]
    if verdict.missing:
        skeleton = json.dumps(dict.fromkeys(verdict.missing, ''))
        notes.append(f'fields to complete in a file for --describe: {skeleton}')
    rows = [
        *(('error', text) for text in errors),
        *verdict.remarks,
        *verdict.results,
        *([] if package.refusals or score is None else [('report score', f'{score:.2f} min')]),
        *(('warning', text) for text in doubts),
        *(('note', text) for text in notes),
    ]
    state = 'yes' if package.ready else f'no, {plural(len(errors), "thing")} to edit'
    return Answer(
        sentences=[f'ready for {package.round}: {state}', heading],
        tables=[Table('', (), [(Cell(name), Cell(text)) for name, text in rows])],
        data={
            'passed': package.ready,
            'ready': package.ready,
            'tree': str(package.home) if package.home else None,
            'refusals': package.refusals,
            'flaws': [str(fault) for fault in verdict.faults],
            'missing': [asdict(fault) for fault in verdict.faults],
            'oddities': [text for _, text in verdict.remarks],
            'findings': [{'checker': name, 'text': text} for name, text in verdict.results],
            'verdicts': [{'tool': name, 'text': text} for name, text in verdict.results],
            'notes': (*doubts, *package.notes),
            'score_minutes': score_minutes,
            'official_score_minutes': package.official_score_minutes,
        },
        exit_code=EXIT_OK if package.ready else EXIT_FAILED,
    )


def _compare(package: Package, score_minutes: float | None) -> list[str]:
    """Return a warning if the scores of result_summarizer and report differ although no score was
    scaled."""
    official = package.official_score_minutes
    is_scaled = any(name == 'scaling' for name, _ in package.verdict.results)
    if official is None or score_minutes is None or is_scaled:
        return []
    if abs(official - score_minutes) < _SAME_SCORE_MINUTES:
        return []
    hint = '; see the warnings above' if package.verdict.remarks else ''
    return [
        f'the scores differ: {official:.2f} min from result_summarizer, {score_minutes:.2f} min '
        f'from report; the former is official{hint}'
    ]
