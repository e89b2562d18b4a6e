"""Imports point one way, and the analysis half needs none of the heavy packages."""
import subprocess
import sys

import pytest
from helpers import ROOT
from reach import imports

PACKAGE = ROOT / 'mlperf_rn50'
# A module may import from its own room and from those below it.
ROOMS = [{'__main__'}, {'cli'}, {'bench', 'launch'}, {'train'}, {'study'}, {'mlperf', 'data', 'model', 'system'},
         {'options'}, {'config'}, {'files', 'npz', 'safe_path'}, {'errors'}]
HEAVY = ('mxnet', 'nvidia', 'horovod', 'pandas', 'scipy', 'matplotlib', 'jinja2', 'sklearn', 'rich')


def room_of(module: str) -> str:
    parts = module.split('.')
    return parts[1] if len(parts) > 1 else '__init__'


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(ROOMS) if room in rooms)


def test_arrows_point_down():
    wrong = []
    for path in PACKAGE.rglob('*.py'):
        here = path.relative_to(PACKAGE).with_suffix('').parts[0]
        if here == '__init__':
            continue
        for module in imports(path):
            there = room_of(module) if module.startswith('mlperf_rn50.') else None
            if there and there != '__version__' and there != here and level(there) <= level(here):
                wrong.append(f'{path.relative_to(ROOT)} imports {module}')
    assert not wrong


@pytest.mark.parametrize('module', [
    'cli', 'cli.bench', 'cli.check', 'cli.classify', 'cli.doctor', 'cli.evaluate', 'cli.export', 'cli.package',
    'cli.predict', 'cli.prepare', 'cli.recipe', 'cli.report', 'cli.train', 'cli.watch', 'config', 'launch.__main__',
    'launch.kubernetes', 'launch.pod', 'mlperf.events', 'mlperf.check', 'mlperf.package', 'mlperf.reader',
    'mlperf.writer', 'model.weights', 'options', 'cli.completion', 'study.convergence', 'study.layouts', 'study.live',
    'study.predict_tables', 'study.recipe_differences', 'study.recipes', 'study.report_data', 'study.report_tables',
    'study.report_text', 'study.scaling', 'study.systems', 'study.watch_facts',
    'system.doctor', 'system.environment', 'system.stack', 'system.topology', 'train.plan', 'train.watch'])
def test_light_modules_import_nothing_heavy(module):
    code = f'import sys, mlperf_rn50.{module}; print([m for m in {HEAVY!r} if m in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'
