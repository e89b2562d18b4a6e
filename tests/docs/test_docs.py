"""The documentation: the site builds, links lead somewhere, and every block of commands is run or accounted for."""
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, run

PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
LANGUAGES = {'bash', 'text', 'yaml', 'python', 'cfg', 'sh'}  # sh: a file, not commands
REASONS = {'needs GPUs', 'needs ImageNet', 'needs a cluster', 'needs root', 'needs a container engine',
           'needs the network', 'takes minutes', 'takes hours', 'changes the environment', 'runs until it is stopped',
           'runs these tests', 'is a pattern to fill in'}
MARK = re.compile(r'\s*<!-- (.*) -->')
RUN_IN = re.compile(r'run in (tests/\S+\.py)::(test_\w+)')
README_LINES = 150


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, the mark in the line before it ('' without one), and its text."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f'{self.page.relative_to(ROOT)}:{self.line}'


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, those in lists too."""
    found, lines = [], page.read_text().splitlines()
    start = indent = 0
    for i, line in enumerate(lines, start=1):
        fence = re.match(r'( *)```(\S*)', line)
        if not fence:
            continue
        if not start:
            start, indent = i, len(fence[1])
            continue
        mark = MARK.fullmatch(lines[start - 2]) if start > 1 else None
        text = '\n'.join(x[indent:] for x in lines[start:i - 1])
        found.append(Block(page, start, lines[start - 1].strip().removeprefix('```'), mark[1] if mark else '', text))
        start = 0
    assert not start, f'{page}:{start}: this block has no end'
    return found


BLOCKS = [b for page in PAGES for b in blocks_of(page)]


def exit_code_of(block: Block) -> int | None:
    """The exit code that a block of commands must have; None for one that is not run."""
    if block.language != 'bash':
        return None
    found = re.fullmatch(r'exits (\d+)', block.mark)
    return int(found[1]) if found else None if block.mark else 0


def programs_of(text: str) -> set[str]:
    """What a block starts: scripts of launch/ by their names, commands of mlperf-rn50."""
    words = shlex.split(text.replace('\\\n', ' '), comments=True)
    commands = {b for a, b in zip(words, words[1:]) if a.endswith('mlperf-rn50') and not b.startswith('-')}
    return commands | {Path(w).name for w in words if re.fullmatch(r'(\./)?launch/\w+\.(sh|sbatch)', w)}


def trouble_with(block: Block) -> str:
    """What is wrong with how a block is accounted for; '' where nothing is."""
    if block.language not in LANGUAGES:
        return f'the language is {block.language!r}, expected one of {", ".join(sorted(LANGUAGES))}'
    if block.language != 'bash' or exit_code_of(block) is not None:
        return ''
    if block.mark.startswith('not run: '):
        unknown = set(block.mark.removeprefix('not run: ').split(', ')) - REASONS
        return f'not a reason: {", ".join(sorted(unknown))}' if unknown else ''
    named = RUN_IN.fullmatch(block.mark)
    if not named:
        return f'an unknown mark: {block.mark}'
    path, helpers = ROOT / named[1], ROOT / 'tests/helpers.py'
    text = path.read_text() if path.is_file() else ''
    if not re.search(rf'^def {named[2]}\(', text, re.MULTILINE):
        return f'{named[1]} has no {named[2]}'
    text += helpers.read_text() if 'under_ranks(' in text else ''  # it starts launch/ranks.sh
    missing = [p for p in programs_of(block.text) if not re.search(rf'\b{re.escape(p)}\b', text)]
    return f'{named[1]} does not run {", ".join(missing)}' if missing else ''


def test_every_block_is_accounted_for():
    assert [f'{b}: {trouble}' for b in BLOCKS if (trouble := trouble_with(b))] == []


@pytest.mark.parametrize('language, mark, text, said', [
    ('', '', '', "the language is ''"), ('bash', 'skip', 'true', 'an unknown mark: skip'),
    ('bash', 'not run: needs patience', 'true', 'not a reason: needs patience'),
    ('bash', 'run in tests/none.py::test_x', 'true', 'tests/none.py has no test_x'),
    ('bash', 'run in tests/e2e/test_bench.py::test_x', 'true', 'tests/e2e/test_bench.py has no test_x'),
    ('bash', 'run in tests/e2e/test_bench.py::test_the_exchange_alone', 'launch/x.sh', 'does not run x.sh'),
    ('bash', 'run in tests/e2e/test_bench.py::test_the_exchange_alone', 'mlperf-rn50 bench allreduce', ''),
    ('bash', 'not run: needs root, takes hours', 'true', ''), ('bash', 'exits 1', 'false', ''),
    ('text', '', '$ x', '')])
def test_what_is_not_accounted_for_is_said(language, mark, text, said):
    trouble = trouble_with(Block(ROOT / 'README.md', 1, language, mark, text))
    assert said in trouble and bool(said) == bool(trouble)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the checkout's own files, with its .venv."""
    listed = run(['git', '-C', ROOT, 'ls-files', '-z', '--cached', '--others', '--exclude-standard'])
    assert listed.returncode == 0, listed.stderr
    for name in filter(None, listed.stdout.split('\0')):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / '.venv').symlink_to((ROOT / '.venv').resolve())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize('page', [p for p in PAGES if any(b.page == p and exit_code_of(b) is not None for b in BLOCKS)],
                         ids=lambda p: p.name)
def test_commands_do_what_the_page_says(page, checkout):
    environment = {**os.environ, 'PATH': f'{checkout}/.venv/bin:{os.environ["PATH"]}', 'PYTHONPATH': str(checkout)}
    for block in BLOCKS:
        code = exit_code_of(block)
        if block.page == page and code is not None:
            done = subprocess.run(['bash', '-euo', 'pipefail', '-c', block.text], cwd=checkout, env=environment,
                                  capture_output=True, text=True, timeout=HANG_LIMIT_S)
            assert done.returncode == code, f'{block}\n{block.text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}'


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as a forge makes them."""
    outside = re.sub(r'^ *```.*?^ *```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r'^#+ (.+)$', outside, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', h.strip().lower()).replace(' ', '-') for h in headings}


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r'^ *```.*?^ *```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        path, _, anchor = target.partition('#')
        place = (page.parent / path).resolve() if path else page
        if '://' not in target and not (place.exists() and (not anchor or anchor in anchors_of(place))):
            broken.append(target)
    assert broken == []


def test_the_readme_is_short():
    assert len((ROOT / 'README.md').read_text().splitlines()) <= README_LINES


def test_the_set_up_page_quotes_the_script():
    script = (ROOT / 'launch/setup.sh').read_text().splitlines()
    header = [line.removeprefix('#').removeprefix(' ') for line in script[1:] if line.startswith('#')]
    quoted = next(b for b in BLOCKS if b.page.name == 'setup.md' and 'Usage:' in b.text).text.splitlines()
    assert quoted == header[:len(quoted)]


def test_the_site_builds_without_a_warning_and_asks_nobody_else(tmp_path):
    # The theme's maker advertises its successor on the terminal.
    done = run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '--config-file', ROOT / 'mkdocs.yml', '--site-dir',
                tmp_path], env={**os.environ, 'NO_MKDOCS_2_WARNING': '1'})
    assert done.returncode == 0 and 'WARNING' not in done.stderr, done.stderr
    built = sorted(tmp_path.rglob('*.html'))
    assert {p.stem for p in (ROOT / 'docs').glob('*.md')} <= {p.stem for p in built}
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^">]*')
    assert [m for p in built for m in fetched.findall(p.read_text()) if 'rel="canonical"' not in m] == []
