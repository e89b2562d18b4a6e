"""Does the analysis of logs give right answers? Prints what is expected, and what the program says.

    python tests/answers.py [--published DIR] [--keep DIR]

The published logs' answers below were worked out from their raw lines, by hand; the lines are named beside them. Those
of the made-up trees (trees.py) follow from how the trees are made. The program is asked as a user asks it, through its
commands; nothing of its inside is used. Ends with 0 only if every answer is as expected.
"""
import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trees
from helpers import CLI, PUBLISHED, call

CHILD_LIMIT_S = 60  # of a command that could hang; each takes about a second
TOLERANCE = 1e-3  # relative, of numbers that are no counts


# What is expected

@dataclass(frozen=True)
class Row:
    """One answer.

    Args:
        what: was asked.
        expected: the right answer, in words.
        found: what the program says.
        is_right: whether that is it.
    """

    what: str
    expected: str
    found: str
    is_right: bool


@dataclass(frozen=True)
class Is:
    """A right answer that is not one value."""

    text: str
    test: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.text


SOME_SECONDS = Is('some seconds', lambda v: isinstance(v, (int, float)) and 0 <= v < 600)
NOT_CONVERGED = Is('not converged', lambda v: v is not None and v != 'converged')
A_FRACTION = Is('a fraction, or none', lambda v: v is None or 0 <= v <= 1)


def at_most(number: int) -> Is:
    return Is(f'at most {number}', lambda v: v is not None and v <= number)


def one_of(*values: Any) -> Is:
    return Is(' or '.join(map(str, values)), lambda v: v in values)


def is_right(expected: Any, found: Any) -> bool:
    if isinstance(expected, Is):
        return bool(expected.test(found))
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return abs(found - expected) <= TOLERANCE * max(abs(expected), 1e-9)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(is_right, expected, found))
    return found == expected and type(found) is type(expected)


def answer(what: str, expected: Any, found: Any) -> Row:
    return Row(what, str(expected), str(found), is_right(expected, found))


def said(pattern: str, sentences: Sequence[str]) -> Row:
    hit = next((s for s in sentences if re.search(pattern, s)), None)
    others = f'not said, but: {"; ".join(sentences)}' if sentences else 'not said'
    return Row('said', f'/{pattern}/', hit or others, hit is not None)


def not_said(pattern: str, sentences: Sequence[str]) -> Row:
    hit = next((s for s in sentences if re.search(pattern, s)), None)
    return Row('not said', f'no /{pattern}/', hit or 'nothing of it', hit is None)


# How the program is asked

def child(*arguments: object, prefix: Sequence[str] = (), **keys: Any) -> subprocess.CompletedProcess | None:
    """The program as a process of its own; None where it does not end in time."""
    try:
        return subprocess.run([*prefix, *CLI, *map(str, arguments)], timeout=CHILD_LIMIT_S, text=True,
                              **{'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE,
                                 **keys})
    except subprocess.TimeoutExpired:
        return None


def ended(done: subprocess.CompletedProcess | None) -> Row:
    return Row('ends', f'within {CHILD_LIMIT_S} s', 'no' if done is None else 'yes', done is not None)


@dataclass
class Report:
    """What `report --format json` says of a tree."""

    done: subprocess.CompletedProcess
    systems: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        try:
            self.systems = json.loads(self.done.stdout)['systems']
        except ValueError:
            self.systems = []

    def named(self, name: str) -> dict[str, Any] | None:
        return next((s for s in self.systems if s['system'] == name), None)

    def sentences(self, name: str, run: int | None = None) -> list[str]:
        """What is said of a system, or of one of its runs: each sentence once."""
        system = self.named(name) or {}
        runs = [r for r in system.get('runs', []) if run is None or f'result_{run}.txt' in r['file']]
        texts = [w for r in runs for w in r['warnings']]
        if run is None:
            texts += [*system.get('warnings', []), system.get('refusal') or '', *self.done.stderr.splitlines()]
        return [t for t in dict.fromkeys(texts) if t]


@dataclass(frozen=True)
class Want:
    """What must be found of a system.

    Args:
        name: of the system.
        values: by the report's keys.
        says: patterns of sentences that must stand there.
        silent: patterns of sentences that must not.
        runs: values of single runs, by their numbers.
        run_says: patterns of sentences on single runs.
        num_sentences: on a run, by its number.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    says: Sequence[str] = ()
    silent: Sequence[str] = ()
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    run_says: dict[int, Sequence[str]] = field(default_factory=dict)
    num_sentences: dict[int, Is] = field(default_factory=dict)

    def rows(self, report: Report) -> Iterator[Row]:
        system = report.named(self.name)
        if system is None:
            stated = ' '.join(report.done.stderr.split())
            yield Row(self.name, 'is reported', f'no such system; exit code {report.done.returncode}: {stated}', False)
            return
        for key, expected in self.values.items():
            yield answer(f'{self.name} {key}', expected, system.get(key, 'no such key'))
        parts = system['time_parts_s'] or {}
        negative = {k: v for k, v in parts.items() if v is not None and v < -0.01}
        yield Row(f'{self.name} parts of the time', 'none negative', str(negative or 'none negative'), not negative)
        for pattern in self.says:
            yield said(pattern, report.sentences(self.name))
        for pattern in self.silent:
            yield not_said(pattern, report.sentences(self.name))
        for k, values in self.runs.items():
            run = next((r for r in system['runs'] if f'result_{k}.txt' in r['file']), {})
            for key, expected in values.items():
                yield answer(f'result_{k} {key}', expected, run.get(key, 'no such key'))
        for k, patterns in self.run_says.items():
            for pattern in patterns:
                yield said(pattern, report.sentences(self.name, k))
        for k, number in self.num_sentences.items():
            yield answer(f'sentences on result_{k}', number, len(report.sentences(self.name, k)))


Look = Callable[[Path], list[Row]]


def reported(*wants: Want, code: int = 0, table: Sequence[str] = ()) -> Look:
    """The report's answers on a tree.

    Args:
        code: exit code.
        table: patterns that the table for people must hold.
    """
    def look(tree: Path) -> list[Row]:
        report = Report(call('report', tree, '--format', 'json'))
        rows = [answer('exit code', code, report.done.returncode), *(r for w in wants for r in w.rows(report))]
        if table:
            text = call('report', tree).stdout.splitlines()
            rows += [Row('in the table', f'/{p}/', next((' '.join(s.split()) for s in text if re.search(p, s)), 'no'),
                         any(re.search(p, s) for s in text)) for p in table]
        return rows
    return look


def packaged(code: int | Is, *patterns: str) -> Look:
    """What `package` says of five runs; a refusal leaves nothing behind."""
    def look(tree: Path) -> list[Row]:
        out = tree / 'out'
        done = call('package', tree / 'box', '--org', 'us', '--system', 'vm', '--out', out)
        sentences = [' '.join(s.split()) for s in (done.stdout + done.stderr).splitlines()]
        rows = [answer('exit code', code, done.returncode), *(said(p, sentences) for p in patterns)]
        if done.returncode:
            left = [p.name for p in out.rglob('*')] if out.exists() else []
            rows.append(answer('left behind', [], left))
        return rows
    return look


# The answers

SCORE = {'num_runs': 5, 'num_converged': 5, 'epochs_to_converge_mean': 40.0, 'score_minutes': 10.2}
NO_SCORE = {'score_minutes': None, 'official_score_minutes': None}
REFUSED = {**NO_SCORE, 'time_to_train_mean_s': None, 'epochs_to_converge_mean': None, 'speedup': None,
           'efficiency': None}
# One of five did not converge: the three slowest of the others count, without the fastest: 10.1, 10.3 and 10.4.
ONE_FAILED = {'num_runs': 5, 'num_converged': 4, 'score_minutes': (10.1 + 10.3 + 10.4) / 3}
GOOD = reported(Want('box', SCORE))


def said_of_the_third(*patterns: str, **values: Any) -> Look:
    """One of five logs has something against it, and it is said."""
    return reported(Want('box', {'num_runs': 5, **values}, run_says={2: patterns}))


def failed_third(*patterns: str, status: Any = NOT_CONVERGED) -> Look:
    """One of five logs is no success; it is shown, and the reason said."""
    return reported(Want('box', ONE_FAILED, runs={2: {'status': status, 'epochs_to_converge': None}},
                         run_says={2: patterns}), code=int(status == 'unreadable'))


def read_or_said(pattern: str, **values: Any) -> Look:
    """Either the values are found, or it is said why not."""
    def look(tree: Path) -> list[Row]:
        found = reported(Want('box', values))(tree)
        report = Report(call('report', tree, '--format', 'json'))
        spoken = said(pattern, report.sentences('box'))
        wrong = [r for r in found if not r.is_right]
        if not wrong or not spoken.is_right:
            return found
        return [*(r for r in found if r.is_right), spoken]
    return look


def scaled_as_the_official_tool(scale: float, unscaled: float) -> Look:
    """The score that result_summarizer gives on the same tree, once the checkers have been over it."""
    def look(tree: Path) -> list[Row]:
        rows = reported(Want('box', {**{k: v for k, v in SCORE.items() if k[0] == 'n'}, 'score_minutes': unscaled,
                                     'official_score_minutes': unscaled * scale}))(tree)
        official = official_score(tree / 'v4.0/us', 'box', '4.0.0')
        ours = (Report(call('report', tree, '--format', 'json')).named('box') or {}).get('official_score_minutes')
        return [*rows, answer('result_summarizer', unscaled * scale, official),
                answer('official score is that of result_summarizer', official, ours)]
    return look


def official_score(home: Path, system: str, ruleset: str) -> float | None:
    """What result_summarizer says, of a copy: the checkers write into the tree.

    The convergence check writes the factor beside the logs, and the summary after it applies that.
    """
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / home.name
        shutil.copytree(home, copy)
        for _ in range(2):
            subprocess.run([sys.executable, '-m', 'mlperf_logging.result_summarizer', str(copy), 'training', ruleset,
                            '--csv', 'summary.csv'], cwd=place, capture_output=True, timeout=600)
        path = Path(place) / 'summary.csv'
        rows = list(csv.DictReader(path.open())) if path.is_file() else []
    values = [r['resnet'] for r in rows if r.get('system') == system and r.get('resnet')]
    return float(values[0]) if values else None


def as_nobody() -> list[str]:
    """What takes root's right to read everything from a command; nothing where it is not root."""
    rights = '-dac_override,-dac_read_search'
    return ['setpriv', f'--bounding-set={rights}', f'--inh-caps={rights}'] if os.geteuid() == 0 else []


def shut_folder(tree: Path) -> list[Row]:
    done = child('report', tree, '--format', 'json', prefix=as_nobody())
    (tree / 'shut').chmod(0o755)
    if done is None:
        return [ended(done)]
    report = Report(done)
    sentences = [*done.stderr.splitlines(), *(t for s in report.systems for t in report.sentences(s['system']))]
    return [answer('exit code', 1, done.returncode), *Want('good', SCORE).rows(report),
            said('cannot be read', sentences),
            answer('shut is a row', True, 'shut' in [s['system'] for s in report.systems])]


def named_pipe(tree: Path) -> list[Row]:
    done = child('report', tree, '--format', 'json')
    rows = [ended(done)]
    if done:
        report = Report(done)
        rows += [answer('exit code', 1, done.returncode),
                 *Want('box', {'num_converged': 4}, says=['(?i)pipe|regular|no file']).rows(report)]
    checked = child('check', tree / 'box/result_0.txt')
    rows.append(ended(checked))
    if checked:
        rows += [answer('exit code of check', one_of(1, 2), checked.returncode),
                 said('(?i)pipe|regular|no file', (checked.stdout + checked.stderr).splitlines())]
    return rows


def full_disk(tree: Path) -> list[Row]:
    """Nothing more can be written where the output goes."""
    rows = []
    for arguments in (('report', tree), ('check', tree / 'box/result_0.txt')):
        with open('/dev/full', 'w') as full:
            done = child(*arguments, stdout=full)
        if done is None:
            return [ended(done)]
        lines = done.stderr.splitlines()
        rows += [answer(f'exit code of {arguments[0]}', 1, done.returncode),
                 Row('stderr', 'one line', done.stderr[-300:], len(lines) == 1 and 'Traceback' not in done.stderr)]
    return rows


def reader_gone(tree: Path) -> list[Row]:
    """As of `| head -1`: who reads the output has left before it is written."""
    rows = []
    for arguments in (('report', tree), ('report', tree, '--format', 'json'), ('check', tree / 'box/result_0.txt')):
        reading, writing = os.pipe()
        os.close(reading)
        done = child(*arguments, stdout=writing)
        os.close(writing)
        if done is None:
            return [ended(done)]
        rows += [answer(f'stderr of {" ".join(map(str, arguments[::2]))[:20]}', '', done.stderr),
                 Row('exit code', 'not that of a mistake, 2', str(done.returncode), done.returncode != 2)]
    return rows


def checked_in_time(pattern: str) -> Look:
    """`check` of a long line ends, and names the line."""
    def look(tree: Path) -> list[Row]:
        done = child('check', tree / 'result_0.txt')
        if done is None:
            return [ended(done)]
        lines = [line[:300] for line in (done.stdout + done.stderr).splitlines()]
        rows = [ended(done), not_said('Traceback', lines)]
        return [*rows, said(pattern, lines)] if pattern else rows
    return look


def orgs_are(*expected: str) -> Look:
    def look(tree: Path) -> list[Row]:
        report = Report(call('report', tree, '--format', 'json'))
        return [answer('organisations', list(expected), [s['org'] for s in report.systems])]
    return look


def only_system(name: str) -> Look:
    def look(tree: Path) -> list[Row]:
        report = Report(call('report', tree, '--format', 'json'))
        return [answer('systems', [name], [s['system'] for s in report.systems]),
                *Want(name, SCORE).rows(report)]
    return look


@dataclass(frozen=True)
class Case:
    """A made-up tree and its answers.

    Args:
        name: of the case and of its folder.
        why: the answers are right.
        make: writes the tree.
        look: asks the program and compares.
    """

    name: str
    why: str
    make: trees.Make
    look: Look

    def rows(self, folder: Path) -> list[Row]:
        """Writes the tree into a folder that does not exist, and asks."""
        tree = folder / self.name
        self.make(tree)
        return self.look(tree)


def no_words(name: str, **values: Any) -> Want:
    """A set that is right, against which nothing may be said."""
    return Want(name, {**SCORE, 'warnings': [], **values})


ODD_CLOCK = '(?i)clock|back|earlier|order|negative|overlap|before (line|the)'
TOO_LONG = '(?i)long|bytes|torn|line 31|:31'
SEED_LINES = {'num_accelerators': 640, 'global_batch_size': 16640, 'num_nodes': 40}
# The reference of 4.0.0 at a batch of 3264, its 15 runs without the fewest and the most epochs: 34, 9 x 35, 3 x 36.
REFERENCE_EPOCHS = (34 + 9 * 35 + 3 * 36) / 13
SIXTEEN = {**SCORE, 'num_accelerators': 16, 'global_batch_size': 4096, 'num_nodes': 1}


def _shifts() -> list[Case]:
    cases = []
    for format_name, run in (('v0.5', trees.v05_run), ('MLLOG', trees.later_run)):
        for key, by_s, why in (('run_start', 600, 'run_start after the first epochs'),
                               ('run_start', -600, 'run_start before the initialisation'),
                               ('run_stop', -600, 'run_stop before the last evaluation'),
                               ('run_stop', 600, 'ten minutes without a line, then run_stop')):
            name = f'{key}_{"later" if by_s > 0 else "earlier"}_{format_name}'
            cases.append(Case(name, f'{why}: the time is not to be trusted, and that is said',
                              trees.shifted(key, by_s, run), said_of_the_third(key)))
    return cases


def _numbers() -> list[Case]:
    cases = []
    for name, text in (('nan', 'NaN'), ('infinity', 'Infinity'), ('minus_infinity', '-Infinity'), ('huge', '1e400'),
                       ('digits', '9' * 5000), ('negative', '-5'), ('text', '"soon"'), ('truth', 'true'),
                       ('nothing', 'null'), ('list', '[1]')):
        cases.append(Case(f'time_{name}', 'run_stop has no time: a run without an end',
                          trees.bad_number(text), failed_third('(?i)torn|time', 'no run_stop', status='failed')))
    cases.append(Case('time_in_3000_years', 'a time that no clock shows is said, and makes no success',
                      trees.bad_number('99999999999999'), said_of_the_third('run_stop')))
    return cases


def _descriptions() -> list[Case]:
    def case(name: str, why: str, nodes: object, per_node: object, look: Look, inits: int = 1) -> Case:
        return Case(f'described_{name}', why, trees.described_as(nodes, per_node, inits), look)

    def found(num_nodes: int, num_accelerators: int) -> Look:
        return reported(Want('box', {**SCORE, 'num_nodes': num_nodes, 'num_accelerators': num_accelerators}))
    return [
        case('pod', 'one process for a pod: only the description counts accelerators', '1', '512', found(1, 512)),
        case('rank_a_node', '128 processes of 128 nodes are not 128 accelerators', '128', '4', found(128, 512), 128),
        case('spaces', 'numbers as people type them', ' 2 ', '8 ', found(2, 16)),
        case('floats', 'numbers as a spreadsheet writes them', 2.0, '8.0', found(2, 16)),
        case('product', '"4x8" is no number: 32, or said', '1', '4x8',
             read_or_said('4x8', num_accelerators=32)),
        case('words', '"8 (2 boards)" is 8, or said', '2', '8 (2 boards)',
             read_or_said('8 \\(2 boards\\)', num_accelerators=16)),
        case('not_named', 'N/A is no number: unknown, or said', '2', 'N/A', read_or_said('N/A', num_accelerators=None))]


def _prefixes() -> list[Case]:
    prefixes = {'rank': ('0: ',), 'mpirun': ('[1,0]<stdout>:',), 'mpirun_without_colon': ('[1,0]<stdout> ',),
                'time': ('2023-05-01 12:00:00.123 | ',), 'glog': ('I0612 12:00:00.123456 4242 main.cc:1] ',),
                'docker': ('worker_1  | ',), 'colour': ('\x1b[36m(Worker pid=1)\x1b[0m ',), 'tab': ('0:\t',),
                'python': ('INFO:root:', 'DEBUG:mlperf_compliance:'), 'braces': ('{"log": "', 'node-3 {0}: ')}
    return [Case(f'prefix_{name}', 'what a launcher writes before a line changes nothing', trees.prefixed(*texts),
                 reported(no_words('box'))) for name, texts in prefixes.items()]


CASES: tuple[Case, ...] = (
    Case('clean', 'nothing is wrong, and nothing is said', trees.clean,
         reported(no_words('old', global_batch_size=1664, num_accelerators=8, org='Acme', round='v0.5'),
                  no_words('middle', global_batch_size=3264, num_accelerators=8, org='us', round='v0.6'),
                  no_words('new', global_batch_size=3264, num_accelerators=8, org='us', round='v2.0'))),
    # Lost lines
    Case('lost_lines', '40 x 16 = 640 accelerators by entry.json, caches and four other logs; two seed lines are lost',
         trees.lost_lines, reported(Want('x40', {**SCORE, **SEED_LINES, 'refusal': None}, says=['638']),
                                    Want('x1', {'score_minutes': 102.0, 'num_accelerators': 8}))),
    Case('lost_lines_without_description', 'four other logs and 638 / 40 tell of lost lines',
         trees.lost_lines_without_description, reported(Want('x40', {**SCORE, **SEED_LINES}, says=['638']))),
    Case('lost_lines_in_the_first', 'the first log is not the measure of the others', trees.lost_lines_in_the_first,
         reported(Want('x40', {**SCORE, **SEED_LINES}, says=['638']))),
    Case('another_batch', 'one log of five has 32 images an accelerator, 20,480: no set; the others are reported',
         trees.another_batch, reported(Want('x40', {**REFUSED, 'num_runs': 5}, says=['(?i)batch.*20480|20480.*batch',
                                                                                     'result_3']),
                                       Want('x1', {'score_minutes': 102.0, 'refusal': None}), code=1,
                                       table=['x40', 'x1 .*102', '20480'])),
    Case('another_batch_later', 'the same in a later round', trees.another_batch_later,
         reported(Want('mixed', {**REFUSED, 'num_runs': 5}, says=['4096', 'result_3']), Want('other', SCORE), code=1,
                  table=['mixed', '4096'])),
    # Doubled lines
    Case('doubled', 'one process of 16 GPUs logs each event to two loggers: 256 x 16 = 4096', trees.doubled,
         reported(Want('x16', {**SIXTEEN, 'speedup': 2.0, 'efficiency': 1.0},
                       num_sentences={k: at_most(2) for k in range(5)}),
                  Want('x8', {'score_minutes': 20.4, 'num_accelerators': 8, 'global_batch_size': 2048}))),
    Case('doubled_without_arguments', 'the description alone says 16', trees.doubled_without_arguments,
         reported(Want('x16', {**SIXTEEN, 'efficiency': 1.0}))),
    Case('doubled_against_arguments', 'arguments of half the batch contradict 256 x 16: said',
         trees.doubled_against_arguments, reported(Want('x16', {**SCORE, 'num_accelerators': 16},
                                                        says=['2048.*4096|4096.*2048']))),
    # Clocks
    *_shifts(),
    Case('clock_set_back', 'times in a log do not fall', trees.clock_set_back, said_of_the_third(ODD_CLOCK)),
    Case('times_in_seconds', 'a run of 0.01 min in 1970 has seconds for milliseconds', trees.times_in_seconds,
         said_of_the_third('(?i)1970|second|unit|clock')),
    Case('evaluation_after_the_end', 'what is evaluated after run_stop is not on the clock',
         trees.evaluation_after_the_end, said_of_the_third('run_stop|after the (end|run)')),
    Case('evaluation_before_the_start', 'one old evaluation changes neither time nor result, and is said',
         trees.evaluation_before_the_start, reported(Want('box', SCORE, says=['run_start']))),
    # Halves
    Case('halves_agree', 'two formats of the same run', trees.halves_agree,
         reported(Want('box', SCORE, silent=['v0\\.5', '(?i)half|halves|disagree']))),
    Case('halves_of_other_accuracies', 'the v0.5 lines end below the target', trees.halves_of_other_accuracies,
         said_of_the_third('0\\.7412')),
    Case('halves_of_other_ends', 'the v0.5 lines end ten minutes later', trees.halves_of_other_ends,
         said_of_the_third('v0\\.5|MLPv0')),
    # Copies and tampering
    Case('copied', 'no two runs share every millisecond: four runs have no score', trees.copied,
         reported(Want('box', NO_SCORE, says=['result_3.*result_1|result_1.*result_3']))),
    Case('copied_to_another_day', 'all moved by a day', trees.copied_to_another_day,
         reported(Want('box', NO_SCORE, says=['result_3.*result_1|result_1.*result_3']))),
    Case('package_five', 'five real runs are accepted', trees.digits, packaged(0, '5 of 5 pass')),
    Case('package_copied', 'a copy is refused', trees.digits_copied,
         packaged(1, 'result_3.*result_1|result_1.*result_3')),
    Case('package_went_on', 'an evaluation had reached the target before', trees.digits_went_on,
         packaged(one_of(0, 1), 'result_1.*target|target.*result_1')),
    Case('package_stopped_twice', 'two run_stop, of other statuses', trees.digits_stopped_twice,
         packaged(one_of(0, 1), 'result_1.*run_stop|run_stop.*result_1|result_1.*(failed|aborted)')),
    Case('went_on', 'an evaluation had reached the target before', trees.went_on,
         said_of_the_third('reached the target')),
    Case('stopped_after_success', 'success, then aborted: no success', trees.stopped_twice('success', 'aborted'),
         failed_third('run_stop')),
    Case('stopped_before_success', 'aborted, then success: no success', trees.stopped_twice('aborted', 'success'),
         failed_third('run_stop')),
    Case('no_word_of_success', 'the target is reached, and run_stop does not say success: say why it does not count',
         trees.no_word_of_success, failed_third('run_stop|success')),
    # The official score
    Case('scaled', 'fewer epochs than the reference: result_summarizer scales the score', trees.scaled,
         scaled_as_the_official_tool(REFERENCE_EPOCHS / (103 / 3), 10.2)),
    Case('not_scaled', 'more epochs than the reference: nothing is applied', trees.not_scaled,
         scaled_as_the_official_tool(1.0, 10.2)),
    # Names
    Case('other_org', 'folder and description say who submits; the logs say another', trees.other_org,
         reported(Want('box', {**SCORE, 'org': 'Beta'}, says=['\\bus\\b']))),
    Case('other_org_in_folder_only', 'the folder of the submission does, too', trees.other_org_in_folder_only,
         reported(Want('box', {**SCORE, 'org': 'Beta'}, says=['\\bus\\b']))),
    Case('org_in_other_letters', '"us" is "US"', trees.org_in_other_letters,
         reported(Want('box', SCORE, silent=['(?i)organi[sz]ation|submission_org|submitter']))),
    Case('no_submission', 'no folder of an organisation: the logs say who', trees.no_submission,
         reported(no_words('box', org='us'))),
    Case('one_tree_a_submission', 'v0.5: <org>/<submission>/results/<system>', trees.one_tree_a_submission,
         orgs_are('Acme', 'Acme')),
    # Files that cannot be read
    Case('shut_folder', 'what cannot be read is said, and the rest reported', trees.unreadable_folder, shut_folder),
    Case('pipe', 'a named pipe is no log, and nobody waits for it', trees.pipe, named_pipe),
    Case('full_disk', 'one line, no traceback', trees.plain, full_disk),
    Case('reader_gone', 'not a mistake of the user, and not a word', trees.plain, reader_gone),
    # Long lines
    *(Case(f'line_{kind}_{size // 1000}kB', 'a line costs no more than its length', trees.long_line(size, kind),
           checked_in_time(pattern))
      for size in (100_000, 1_000_000)
      for kind, pattern in (('value', ''), ('tokens', TOO_LONG), ('brackets', TOO_LONG), ('spaces', TOO_LONG),
                            ('plain', ''))),
    # Logs that end before the end
    Case('running', 'no run_stop, and written a moment ago: 38 epochs, 74.08 % at best', trees.running,
         reported(Want('box', {'num_runs': 5, 'num_converged': 4}, runs={4: {'status': 'running',
                                                                                    'age_s': SOME_SECONDS}}),
             table=['(?i)running', '74\\.08', '\\b38\\b'])),
    Case('ended_long_ago', 'no run_stop, and two days old', trees.ended_long_ago,
         reported(Want('box', {'num_runs': 5, 'num_converged': 4}, runs={4: {'status': 'failed'}},
                       run_says={4: ['no run_stop']}))),
    Case('cut_in_a_line', 'the last line is half a line', trees.cut_in_a_line,
         failed_third('no run_stop', status='failed')),
    # Many of one
    Case('repeated', 'twelve of one kind are a sentence with a count', trees.repeated,
         reported(Want('box', SCORE, run_says={2: ['global_batch_size.*12|12.*global_batch_size']},
                       num_sentences={2: at_most(1)}))),
    Case('torn_often', 'twelve torn lines are a sentence with a count', trees.torn_often,
         reported(Want('box', SCORE, run_says={2: ['12.*torn|torn.*12']}, num_sentences={2: at_most(1)}))),
    Case('evaluated_twice', 'each evaluation stands twice: a sentence', trees.evaluated_twice,
         reported(Want('box', SCORE, num_sentences={2: at_most(1)}))),
    # Hostile
    *_numbers(),
    Case('accuracies_in_per_cent', '76.02 is no fraction: said, and never more than 1',
         trees.accuracy_as(lambda a: 100 * a), reported(Want('box', says=['(?i)fraction|per ?cent|%'], runs={
             k: {'final_accuracy': A_FRACTION} for k in range(5)}))),
    Case('accuracies_in_objects', '{"value": 0.76} is 0.76', trees.accuracy_as(lambda a: {'value': a}), GOOD),
    Case('accuracies_in_text', '"0.76" is 0.76, or said', trees.accuracy_as(str),
         read_or_said('eval_accuracy', **SCORE)),
    Case('accuracies_of_float32', '0.7602000236511230 is 0.7602', trees.accuracy_as(lambda a: a + 2.3e-8),
         reported(no_words('box'))),
    Case('byte_order_mark', 'three bytes before the first line', trees.encoded(lambda s: s.encode('utf-8-sig')),
         reported(no_words('box'))),
    Case('carriage_returns', 'lines end as on Windows', trees.encoded(lambda s: s.replace('\n', '\r\n').encode()),
         reported(no_words('box'))),
    Case('utf16', 'as a redirection of PowerShell writes it: read, or named',
         trees.encoded(lambda s: s.encode('utf-16')), read_or_said('(?i)utf-?16|encod', **SCORE)),
    Case('zipped', 'a compressed file is no log', trees.encoded(trees.zipped),
         failed_third('(?i)gzip|compress|no MLPerf log line', status='unreadable')),
    Case('zero_bytes', 'holes of a file system', trees.encoded(lambda s: b'\0' * 4096 + s.encode()), GOOD),
    Case('interleaved', 'the inner line counts, the outer one is torn', trees.interleaved,
         reported(Want('box', SCORE, run_says={2: ['torn']}))),
    Case('two_runs', 'which of the two would count?', trees.two_runs,
         failed_third('more than one run', status='unreadable')),
    Case('empty', 'a file without a line', trees.empty, failed_third('(?i)no MLPerf log line|empty',
                                                                     status='unreadable')),
    # Habits of strangers
    *_prefixes(),
    Case('epochs_in_floats', '40.0 is 40', trees.epochs_as(float), reported(no_words('box'))),
    Case('epochs_in_fractions', '39.99 epochs are 40, as steps go', trees.epochs_as(lambda e: e - 0.01), GOOD),
    Case('epochs_in_text', '"40" is 40, or said', trees.epochs_as(str), read_or_said('epoch', **SCORE)),
    Case('epochs_from_0', 'epochs 0 to 39 are 40', trees.epochs_as(lambda e: e - 1), GOOD),
    Case('evaluation_of_epoch_0', 'an evaluation before the first epoch does not move the others',
         trees.evaluation_of_epoch_0, GOOD),
    Case('only_epochs_from_0', 'epochs 0 to 39, evaluations named by how many were trained: 40',
         trees.only_epochs_from_0, GOOD),
    Case('v05_epochs_from_1', 'v0.5 counts from 0; a log whose first epoch is 1 does not', trees.v05_epochs_from_1,
         reported(Want('box', SCORE))),
    Case('blocks_from_0', 'blocks 0 + 8 to 32 + 8 are 40 epochs', trees.blocks_from_zero, GOOD),
    Case('blocks_by_their_last', 'an evaluation names its epoch, whatever its block', trees.blocks_by_their_last,
         reported(no_words('box'))),
    Case('blocks_in_fractions', 'a block of 8.01 epochs', trees.blocks_in_fractions, GOOD),
    Case('no_times_of_submission', 'who submits has no time; run_final is no end', trees.no_times_of_submission,
         reported(no_words('box'))),
    Case('two_workers', 'two workers tell of one run', trees.two_workers,
         reported(Want('box', {**SCORE, 'num_nodes': 2, 'num_accelerators': 8},
                       num_sentences={k: at_most(3) for k in range(5)}))),
    Case('several_platforms', 'two nodes name themselves', trees.several_platforms,
         reported(Want('box', {**SCORE, 'num_nodes': 2, 'num_accelerators': 8}))),
    *_descriptions(),
    Case('old_keys_in_systems', 'a description is known by its keys, not by its place', trees.old_keys_in_systems,
         reported(Want('box', {**SCORE, 'num_nodes': 512, 'num_accelerators': 2048, 'framework': 'MXNet 1.3'}))),
    Case('entry_of_the_whole', '"chip-512" on 64 nodes with 512 accelerators: 512 in all, or said',
         trees.entry_of_the_whole, read_or_said('512', num_accelerators=512, global_batch_size=32768)),
    Case('batch_in_text', '"3264" is 3264, or said', trees.value_as('global_batch_size', '3264'),
         read_or_said('global_batch_size', **SCORE, global_batch_size=3264)),
    Case('batch_in_float', '3264.0 is 3264', trees.value_as('global_batch_size', 3264.0),
         reported(Want('box', {**SCORE, 'global_batch_size': 3264}))),
    Case('foreign_format', 'another logger\'s lines are no log', trees.foreign_format,
         failed_third('no MLPerf log line', status='unreadable')),
    Case('from_one', 'result_1 to result_5', trees.from_one, GOOD),
    Case('other_benchmarks_beside', 'of a round, ResNet is read', trees.other_benchmarks_beside, only_system('box')))


# The published logs

@dataclass(frozen=True)
class Published:
    """What the raw lines of a published set say.

    Args:
        runs: of each run: line of run_start and its time, line of run_stop and its time (seconds since 1970), line of
            the last eval_accuracy, epochs trained by then (v0.5 counts from 0).
        num_accelerators: lines of run_set_random_seed (v0.5) or of init_start, one of each rank; where one process
            drives all, "num_accelerators" of entry.json, line 19.
        batch: global_batch_size; v0.5: input_batch_size x accelerators.
        batch_line: of result_0.txt.
    """

    round: str
    system: str
    num_accelerators: int
    batch: int
    batch_line: int
    runs: tuple[tuple[int, float, int, float, int, int], ...]


RAW = (
    Published('v0.5', 'dgx1_ngc18.11_mxnet', 8, 1664, 317, (
        (3, 1541720386.718, 449, 1541728484.695, 447, 63),
        (3, 1541720386.943, 449, 1541728494.858, 447, 63),
        (3, 1541720387.837, 449, 1541728428.213, 447, 63),
        (3, 1541720389.823, 449, 1541728411.887, 447, 63),
        (3, 1541720390.125, 449, 1541728472.344, 447, 63))),
    Published('v0.5', 'dgx2h_multi_ngc18.11_mxnet', 512, 16384, 859, (
        (34, 1541736293.663, 1025, 1541736748.075, 1023, 82),
        (34, 1541737004.973, 1025, 1541737458.046, 1023, 82),
        (34, 1541738439.599, 1025, 1541738891.552, 1023, 82),
        (34, 1541739026.922, 1018, 1541739458.578, 1016, 78),
        (34, 1541735724.806, 1018, 1541736158.207, 1016, 78))),
    Published('v0.6', 'dgx1_ngc19.05_mxnet', 8, 1664, 292, (
        (110, 1560881731.835, 2918, 1560888652.056, 2916, 60),
        (110, 1560881731.505, 2918, 1560888641.483, 2916, 60),
        (110, 1560881731.070, 2746, 1560888219.474, 2744, 56),
        (110, 1560881737.191, 2918, 1560888646.718, 2916, 60),
        (110, 1560881731.891, 2918, 1560888666.433, 2916, 60))),
    Published('v0.6', 'dgx2h_n96_ngc19.05_mxnet', 1536, 59904, 6995, (
        (4983, 1558666200.971, 9230, 1558666280.925, 9228, 90),
        (4983, 1558666392.823, 9274, 1558666472.855, 8916, 90),
        (4983, 1558666584.464, 14754, 1558666664.301, 14752, 90),
        (4983, 1558666775.987, 12468, 1558666855.929, 12466, 90),
        (4983, 1558666968.801, 11808, 1558667048.731, 11806, 90))),
    Published('v0.7', 'dgxa100_ngc20.06_mxnet', 8, 3264, 97, (
        (112, 1592669212.356, 1129, 1592671579.019, 1127, 41),
        (112, 1592669288.183, 1129, 1592671653.448, 1127, 41),
        (112, 1592669289.807, 1129, 1592671649.688, 1127, 41),
        (112, 1592669324.063, 1129, 1592671758.533, 1127, 41),
        (112, 1592669321.699, 1129, 1592671750.110, 1127, 41))),
    Published('v0.7', 'dgxa100_n2_ngc20.06_mxnet', 16, 3264, 161, (
        (184, 1592959453.152, 1225, 1592960877.870, 1223, 41),
        (184, 1592957856.548, 1225, 1592959282.985, 1223, 41),
        (184, 1592959447.272, 1225, 1592960870.213, 1223, 41),
        (184, 1592957855.376, 1225, 1592959280.126, 1223, 41),
        (184, 1592959451.915, 1225, 1592960878.039, 1223, 41)))
)


def published_rows(folder: Path) -> Iterator[tuple[str, list[Row]]]:
    """Each published set with its answers."""
    report = Report(call('report', folder, '--format', 'json'))
    found = {(s['round'], s['system']): s for s in report.systems}
    yield 'published', [answer('sets', sorted((p.round, p.system) for p in RAW), sorted(found)),
                        answer('exit code', 0, report.done.returncode)]
    for p in RAW:
        system = found.get((p.round, p.system), {})
        runs = system.get('runs', [])
        minutes = [(stop - start) / 60 for _, start, _, stop, _, _ in p.runs]
        score = sum(sorted(minutes)[1:-1]) / 3
        values = {'num_accelerators': p.num_accelerators, 'global_batch_size': p.batch, 'num_converged': 5,
                  'score_minutes': score, 'official_score_minutes': score,  # no reference points in these rounds
                  'org': 'NVIDIA', 'epochs_to_converge_mean': sum(r[5] for r in p.runs) / 5, 'refusal': None}
        rows = [answer(key, value, system.get(key, 'no such key')) for key, value in values.items()]
        rows.append(answer('epochs', [r[5] for r in p.runs], [r['epochs_to_converge'] for r in runs]))
        rows.append(answer('minutes', [round(m, 4) for m in minutes],
                           [round(r['time_to_train_s'] / 60, 4) for r in runs]))
        rows.append(answer('lines of run_start, run_stop and the last eval_accuracy',
                           [[r[0], r[2], r[4]] for r in p.runs],
                           [[r['lines'].get('run_start'), r['lines'].get('run_stop'), r['evaluations'][-1]['line']]
                            for r in runs]))
        rows.append(not_said('(?i)cop(y|ies)|refuse|run_stop|run_start|clock', report.sentences(p.system)))
        yield f'{p.round} {p.system}', rows


# The command

def render(name: str, why: str, rows: Sequence[Row]) -> str:
    """A case as lines of the table."""
    lines = [f'{name}: {why}' if why else name]
    for row in rows:
        expected, found = (textwrap.shorten(t, width) for t, width in ((row.expected, 60), (row.found, 110)))
        lines.append(f'  {"ok   " if row.is_right else "WRONG"}  {row.what[:34]:34}  {expected:40}  {found}')
    return '\n'.join(lines)


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('--published', type=Path, metavar='DIR', default=PUBLISHED, help='the published logs')
    parser.add_argument('--keep', type=Path, metavar='DIR', help='write the made-up trees there, and leave them')
    options = parser.parse_args()
    if options.keep and options.keep.exists():
        parser.error(f'--keep: {options.keep} is there already')
    wrong, number = [], 0

    def show(name: str, why: str, rows: Sequence[Row]) -> None:
        nonlocal number
        number += len(rows)
        wrong.extend([name] if not all(r.is_right for r in rows) else [])
        print(render(name, why, rows), flush=True)
    if options.published.is_dir():
        for name, rows in published_rows(options.published):
            show(name, '', rows)
    else:
        show('published', '', [Row('logs', f'in {options.published}', 'no such folder', False)])
    with tempfile.TemporaryDirectory() as place:
        folder = options.keep or Path(place)
        for case in CASES:
            show(case.name, case.why, case.rows(folder))
    print(f'\n{number} answers, {len(wrong)} cases WRONG' + (f': {", ".join(wrong)}' if wrong else ''))
    return int(bool(wrong))


if __name__ == '__main__':
    sys.exit(main())
