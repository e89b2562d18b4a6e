"""Documentation: site, links, commands, generated pages."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, call, git, run

from mlperf_rn50.cli import COMMANDS
from mlperf_rn50.config import KEYS
from mlperf_rn50.launch.launcher import END_LIMITS_S, GRACE_S, STOP_LIMIT_S, TERM_LIMIT_S

PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
LANGUAGES = {'bash', 'text', 'yaml', 'python', 'cfg', 'sh'}  # sh marks a file and not commands
BLOCK = re.compile(r'^ *```(\S*)\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
NOT_RUN = r'<!-- not run: [^\n]* -->\s*'
CONFIGURED = {'bench', 'doctor', 'evaluate', 'export', 'launch', 'sweep', 'train'}


@cache
def help_of(*words: str) -> str:
    return call(*words, '--help').stdout


@cache
def options_of(program: str, *words: str) -> set[str]:
    """Return the options of a program. Launchers pass unknown ones to train."""
    if program != 'mlperf-rn50':
        text = (ROOT / program).read_text()
        if not (started := re.search(r'^run_program (.+) "\$@"$', text, re.MULTILINE)):
            keys = {f'--{key}' for key in KEYS} if 'launch/local.sh' in text else set()
            return keys | set(re.findall(r'--[a-z-]+', text.partition('\nset ')[0]))
        words = tuple(started[1].split())
    texts = [help_of(*words)]
    if words and words[0] in ('launch', 'sweep'):
        texts.append(help_of('train'))
    keys = (
        {f'--{key}' for key in [*KEYS, 'telemetry', 'init-weights']}
        if words and words[0] in CONFIGURED
        else set()
    )
    return keys | set(re.findall(r'--[\w.-]+', '\n'.join(texts)))


def seconds_in(text: str) -> list[float]:
    """Return the times in a text, such as 10 s or 2 minutes, in seconds."""
    found = re.findall(r'(\d+) (s|minutes)\b', text)
    return [float(number) * (60 if unit == 'minutes' else 1) for number, unit in found]


def test_time_limits_of_a_launcher_are_those_of_the_program():
    page = (ROOT / 'docs/faults.md').read_text()
    rows = page.partition('### Time limits of a launcher')[2].partition('\n## ')[0].splitlines()
    cells = [row.strip('|').split('|') for row in rows if row.startswith('| ')]
    limits = {name.strip(): seconds_in(' '.join(texts)) for name, *texts in cells}
    assert limits['a checkpoint after a stop request'] == [STOP_LIMIT_S, TERM_LIMIT_S]
    assert limits['processes of a run that has logged its end'] == [*END_LIMITS_S]
    assert limits['a start-up of a run'] == [GRACE_S, STOP_LIMIT_S]


def unknown_words(program: str, *words: str) -> list[str]:
    """Return the words of a command line that its program does not accept."""
    command = words[:1] if program == 'mlperf-rn50' and words[0][0] != '-' else ()
    if command and command[0] not in COMMANDS:
        return [*command]
    if command and (choices := re.search(r'positional arguments:\n  {(.*?)}', help_of(*command))):
        chosen = words[1]
        if chosen[0] != '-' and chosen not in choices[1].split(','):
            return [chosen]
        command = words[:2] if command[0] == 'launch' else command
    known = options_of(program, *command)
    return [w for w in words if w.startswith('--') and w.partition('=')[0] not in known]


def invalid_names(block: str) -> list[str]:
    """Return the files, commands and options in a block of commands that do not exist."""
    text = re.sub(r'(?<!\\)\n', ' ;\n', re.sub(' +#.*', '', block)).replace('\\\n', ' ')
    words = [w.strip('<()') for w in shlex.split(text)]
    named = [w for w in words if re.fullmatch(r'(launch|tests|docs|benchmarks)/[\w/.-]+\.\w+', w)]
    invalid = [w for w in named if not (ROOT / w).exists()]
    scripts = {w for w in named if re.fullmatch(r'launch/[^/]*\.(sh|sbatch)', w)} - {*invalid}
    starts = [i for i, w in enumerate(words) if w == 'mlperf-rn50' or w in scripts]
    for start, end in zip(starts, [*starts[1:], None]):
        command = words[start:end]
        stop = next((i for i, w in enumerate(command) if w in ('|', '>', '&&', ';')), None)
        invalid += unknown_words(*command[:stop])
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


@pytest.mark.parametrize('name', ['README.md', 'docs/quick-start.md'])
def test_quoted_report_is_up_to_date(name):
    """A line of a page may lack the last columns."""
    [(path, text)] = re.findall(
        r'report (\S+)\n```\n```text\n(.*?)```', (ROOT / name).read_text(), re.DOTALL
    )
    printed = call('report', ROOT / path if (ROOT / path).exists() else path).stdout
    quoted = [line for line in text.splitlines() if line != '...']
    assert len(quoted) > 8 and [q for q in quoted if f'\n{q}' not in f'\n{printed}'] == []


@pytest.mark.slow
def test_quick_start_works_in_a_copy_of_the_checkout(tmp_path):
    listed = git(ROOT, 'ls-files', '-z', '--cached', '--others', '--exclude-standard')
    for name in listed.split('\0'):
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
    assert len(blocks) >= 7
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


def test_scripts_name_existing_test_files():
    """Pytest with several workers runs no tests, without a message, if one file is missing."""
    scripts = [ROOT / '.ci/run', *(ROOT / 'tests').rglob('*.sh')]
    words = [w for p in scripts for w in re.findall(r'tests/[\w/{},]+\.py\b', p.read_text())]
    named = run(['bash', '-c', f"printf '%s\\n' {' '.join(words)}"]).stdout.split()
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


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
    'name, page',
    [
        ('reference', 'configuration'),
        ('history', 'history'),
        ('speeds', 'gpu'),
        pytest.param('output', 'output', marks=pytest.mark.slow),
    ],
)
def test_generated_page_is_up_to_date(name, page):
    done = run(
        [sys.executable, ROOT / f'docs/make_{name}.py'],
        env={'PYTHONPATH': str(ROOT), 'COLUMNS': '40', 'HOME': os.devnull},
    )
    assert done.returncode == 0, done.stderr
    shown = (ROOT / f'docs/{page}.md').read_text()
    assert shown == done.stdout, f'run docs/make_{name}.py as its docstring shows'


def test_every_option_is_described():
    entries = [
        entry
        for name in COMMANDS
        for options in help_of(name).split('\nexamples:')[:1]
        for entry in re.findall(r'^  -.*(?:\n {8,}.*)*', options, re.MULTILINE)
    ]
    bare = [e for e in entries if not re.match(r'  \S.*?(  +|\n +)\S.{6}', e)]
    assert len(entries) > 100 and bare == []
