"""Imports point one way, and the analysis half needs none of the heavy packages."""
import pytest
from closure import closure, imports
from helpers import ROOT

PACKAGE = ROOT / 'mlperf_rn50'
# A module may import from its own room and from those below it.
ROOMS = [{'__main__'}, {'cli'}, {'bench', 'launch'}, {'train'}, {'study'}, {'mlperf', 'data', 'model', 'system'},
         {'options'}, {'config'}, {'jsonl', 'locks'}, {'files', 'npz', 'safe_path'}, {'errors'}]
HEAVY = {'mxnet', 'nvidia', 'horovod', 'pandas', 'scipy', 'matplotlib', 'jinja2', 'sklearn', 'rich'}
LIGHT_ROOMS = ('cli', 'mlperf')
LIGHT = ['config', 'options', 'launch.__main__', 'model.weights', 'study.convergence', 'study.layouts', 'study.live',
         'study.predict_tables', 'study.recipe_differences', 'study.recipes', 'study.report_data',
         'study.report_tables', 'study.report_text', 'study.scaling', 'study.systems', 'study.watch_facts',
         'system.doctor', 'system.environment', 'system.topology', 'train.plan', 'train.watch']


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


@pytest.mark.parametrize('module', LIGHT + [f'{room}.{p.stem}' for room in LIGHT_ROOMS
                                            for p in sorted((PACKAGE / room).glob('[a-z]*.py'))])
def test_light_modules_import_nothing_heavy(module):
    assert {m for m in closure(frozenset({f'mlperf_rn50.{module}'})) if m.split('.')[0] in HEAVY} == set()
