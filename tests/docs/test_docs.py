"""Documentation: site, links, commands, generated pages."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser
from functools import cache
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, call, run

from mlperf_rn50.cli import whole_parser

PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
REFERENCE = ROOT / 'docs/configuration.md'
LANGUAGES = {'bash', 'text', 'yaml', 'python', 'cfg', 'sh'}  # sh marks a file and not commands
BLOCK = re.compile(r'^ *```(\S*)\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
NOT_RUN = r'<!-- not run: [^\n]* -->\s*'


@cache
def commands() -> dict[str, ArgumentParser]:
    """Return the argument parser of each mlperf-rn50 command."""
    return whole_parser()._subparsers._group_actions[0].choices


@cache
def options_of(script: str) -> set[str]:
    """Return the options of a script in launch/."""
    text = (ROOT / script).read_text()
    if not (command := re.search(r'^run_program (.+) "\$@"$', text, re.MULTILINE)):
        return set(re.findall(r'--[a-z-]+', text.partition('\nset ')[0]))
    return known_options(command[1].split())


def known_options(words: list[str]) -> set[str]:
    """Return the options of a command; launchers pass unknown ones to train."""
    parser, train = commands()[words[0]], set(commands()['train']._option_string_actions)
    if words[0] == 'launch' and words[1][0] != '-':
        parser = parser._subparsers._group_actions[0].choices[words[1]]
    return set(parser._option_string_actions) | (
        train if words[0] in ('launch', 'sweep') else set()
    )


def unknown_words(words: list[str]) -> list[str]:
    """Return the words of a command line that its program does not accept."""
    program, *words = words
    if program != 'mlperf-rn50':
        known = options_of(program)
    elif words[0].startswith('-'):
        known = {'--help', '--version', '--debug'}
    elif words[0] not in commands():
        return words[:1]
    else:
        known, parser, words = known_options(words), commands()[words[0]], words[1:]
        first = next((a for a in parser._actions if not a.option_strings), None)
        if (
            first
            and first.choices
            and words
            and words[0][0] != '-'
            and words[0] not in first.choices
        ):
            return words[:1]
    return [w for w in words if w.startswith('--') and w.partition('=')[0] not in known]


def invalid_names(commands_text: str) -> list[str]:
    """Return the files, commands and options in a block of commands that do not exist."""
    invalid, words = (
        [],
        [w.strip('<()') for w in shlex.split(commands_text.replace('\\\n', ' '), comments=True)],
    )
    named = [w for w in words if re.fullmatch(r'(launch|tests|docs|benchmarks)/[\w/.-]+\.\w+', w)]
    invalid += [w for w in named if not (ROOT / w).exists()]
    programs = [
        w
        for w in named
        if w.startswith('launch/') and w.endswith(('.sh', '.sbatch')) and w not in invalid
    ]
    starts = [i for i, w in enumerate(words) if w == 'mlperf-rn50' or w in programs]
    for start, end in zip(starts, [*starts[1:], None]):
        command = words[start:end]
        stop = next((i for i, w in enumerate(command) if w in ('|', '>', '&&', ';')), None)
        invalid += unknown_words(command[:stop])
    return invalid


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_commands_use_existing_files_and_options(page):
    blocks = BLOCK.findall(page.read_text())
    assert {language for language, _ in blocks} <= LANGUAGES
    assert [
        invalid
        for language, text in blocks
        if language == 'bash'
        for invalid in invalid_names(text)
    ] == []


def test_report_in_the_quick_start_is_up_to_date():
    page = (ROOT / 'docs/quick-start.md').read_text()
    path, text = re.search(r'report (\S+)\n```\n```text\n(.*?)\.\.\.\n', page, re.DOTALL).groups()
    assert call('report', ROOT / path).stdout.startswith(text)


@pytest.mark.slow
def test_quick_start_works_in_a_copy_of_the_checkout(tmp_path):
    listed = run(
        ['git', '-C', ROOT, 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    )
    assert listed.returncode == 0, listed.stderr
    for name in filter(None, listed.stdout.split('\0')):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / '.venv').symlink_to((ROOT / '.venv').resolve())
    text = re.sub(
        NOT_RUN + BLOCK.pattern, '', (ROOT / 'docs/quick-start.md').read_text(), flags=BLOCK.flags
    )
    environment = {
        **os.environ,
        'PATH': f'{tmp_path}/.venv/bin:{os.environ["PATH"]}',
        'PYTHONPATH': str(tmp_path),
    }
    blocks = [block for language, block in BLOCK.findall(text) if language == 'bash']
    assert len(blocks) >= 8
    for block in blocks:
        done = subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT_S,
        )
        assert done.returncode == 0, f'{block}\n{done.stdout[-2000:]}{done.stderr[-2000:]}'


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r'^#+ (.+)$', BLOCK.sub('', page.read_text()), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', h.strip().lower()).replace(' ', '-') for h in headings}


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_links_and_pictures_have_targets(page):
    broken = []
    for target in re.findall(r'\]\(([^)\s]+)\)', BLOCK.sub('', page.read_text())):
        path, _, anchor = target.partition('#')
        place = (page.parent / path).resolve() if path else page
        if '://' not in target and not (
            place.exists() and (not anchor or anchor in anchors_of(place))
        ):
            broken.append(target)
    assert broken == []


def test_setup_page_quotes_the_script():
    script = (ROOT / 'launch/setup.sh').read_text().splitlines()
    header = [
        line.removeprefix('#').removeprefix(' ') for line in script[1:] if line.startswith('#')
    ]
    quoted = next(
        text for _, text in BLOCK.findall((ROOT / 'docs/setup.md').read_text()) if 'Usage:' in text
    )
    assert quoted.splitlines() == header[: len(quoted.splitlines())]


@pytest.mark.slow
def test_site_builds_without_warnings_and_external_requests(tmp_path):
    # The variable turns off the theme's advertisement of MkDocs 2.
    done = run(
        [
            sys.executable,
            '-m',
            'mkdocs',
            'build',
            '--strict',
            '--config-file',
            ROOT / 'mkdocs.yml',
            '--site-dir',
            tmp_path,
        ],
        env={**os.environ, 'NO_MKDOCS_2_WARNING': '1'},
    )
    assert done.returncode == 0 and 'WARNING' not in done.stderr, done.stderr
    built = sorted(tmp_path.rglob('*.html'))
    assert {p.stem for p in (ROOT / 'docs').glob('*.md')} <= {p.stem for p in built}
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^">]*')
    assert [
        m for p in built for m in fetched.findall(p.read_text()) if 'rel="canonical"' not in m
    ] == []


@pytest.mark.parametrize(
    'script, page',
    [
        ('make_reference.py', REFERENCE),
        ('make_history.py', ROOT / 'docs/history.md'),
        ('make_speeds.py', ROOT / 'docs/gpu.md'),
    ],
)
def test_generated_page_is_up_to_date(script, page):
    done = run(
        [sys.executable, ROOT / 'docs' / script],
        env={'PYTHONPATH': str(ROOT), 'COLUMNS': '40', 'HOME': os.devnull},
    )
    assert done.returncode == 0, done.stderr
    assert page.read_text() == done.stdout, f'run python docs/{script} as its docstring shows'


def test_series_of_the_history_are_those_of_the_report():
    systems = json.loads(call('report', 'published', '--format', 'json').stdout)['systems']
    shown = {
        (f'{s["org"]} {s["round"]}', f'{s["score_minutes"]:.2f}', f'{100 * s["efficiency"]:.0f} %')
        for s in systems
        if s['efficiency'] and s['score_minutes']
    }
    row = re.compile(r'^\| (\S+ v\d\.\d) \|.*\| ([\d., ]+) \| ([\d %,]+) \|$', re.MULTILINE)
    series = row.findall((ROOT / 'docs/history.md').read_text())
    cells = {
        (name, *cell) for name, *values in series for cell in zip(*(v.split(', ') for v in values))
    }
    assert len(series) > 10 and cells <= shown, cells - shown


def test_every_option_and_key_is_described():
    shown = [
        (name, a)
        for name, parser in commands().items()
        for a in parser._actions
        if a.help != SUPPRESS and a.dest != 'help' and ('.' in a.dest or a.metavar != 'CONFIG')
    ]
    assert (
        len(shown) > 100
        and [a.option_strings for _, a in shown if not a.help or len(a.help) < 8] == []
    )
    rows = re.findall(r'^\| `(\w+)` \|.*\| .{8,} \|$', REFERENCE.read_text(), re.MULTILINE)
    assert set(rows) == {
        a.dest.partition('.')[2] for name, a in shown if name == 'train' and '.' in a.dest
    }
