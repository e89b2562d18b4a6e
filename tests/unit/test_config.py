"""Configurations: accepted values and error messages."""

import dataclasses
import re
import tempfile
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
from helpers import ROOT, call, json_table, table
from hypothesis import assume, given
from hypothesis import strategies as st

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.cli.train import add_options
from mlperf_rn50.config import SECTIONS, Config, check_values, render_yaml, to_tree
from mlperf_rn50.config_file import load_yaml, resolve_config, resolve_tree
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.options import CommConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan, render_plan

CONFIGS = sorted((ROOT / 'launch/configs').glob('*.yaml'))
BATCH = ['--train.local_batch_size', '8']
PARSER = config_parser('train', add_options)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_shipped_configurations_have_a_plan_and_begin_with_their_command(path):
    config = resolve_config(path, [], PARSER)
    assert render_plan(make_plan(config, config.world_size or 2))
    head = path.read_text().split('\n')[:4]
    command = (
        rf'(mlperf-rn50 train|launch/\w+\.sh) (.* )?--config launch/configs/{re.escape(path.name)}'
    )
    assert any(re.search(command, line) for line in head)
    assert any(word in path.read_text() for word in ('ublished', 'easured'))


def test_defaults_then_file_then_command_line(tmp_path):
    path = tmp_path / 'c.yaml'
    path.write_text('train: {local_batch_size: 16, eval_period: 2}\n')
    # not YAML
    options = ['--train.eval_period', '3', '--data.mean', '[1,2,3]', '--run.dir', '*a: b: c']
    config = resolve_config(path, options, PARSER)
    t = config.train
    assert (t.local_batch_size, t.eval_period, t.max_epochs) == (16, 3, None)
    assert config.data.mean == (1.0, 2.0, 3.0) and config.run.dir == '*a: b: c'


def test_printed_configuration_has_every_key_with_a_comment_and_is_read_back(tmp_path):
    options = [f'--run.dir={"long folder " * 20}: x', '--run.reference=["a"]']
    text = call('train', '--config', CONFIGS[0], *options, '--print-config').stdout
    path = tmp_path / 'c.yaml'
    path.write_text(text)
    assert resolve_config(path, [], PARSER) == resolve_config(CONFIGS[0], options, PARSER)
    assert re.findall(r'^(\w+):', text, re.MULTILINE) == list(SECTIONS)
    keys = [f.name for section in SECTIONS.values() for f in dataclasses.fields(section)]
    assert re.findall(r'(?<=  #).*\n  (\w+):', text) == keys
    assert ' 0)\n  base_lr: ' in text


def test_float16_gradients_are_exchanged_without_a_further_compression():
    """The loss scale would exceed the limit of the float32 gradients of BatchNorm."""
    comm = CommConfig(compression='fp16')
    for precision, expected in (('float32', 'fp16'), ('float16', 'none')):
        config = Config(comm=comm, train=TrainConfig(precision=precision))
        assert config.gradient_compression == expected


def test_differences_are_the_keys_that_differ_from_the_defaults():
    c = Config(train=TrainConfig(local_batch_size=8), schedule=ScheduleConfig(step_epochs=(1.0,)))
    text = render_yaml(c, only_changed=True)
    assert text == 'schedule:\n  step_epochs: [1.0]\ntrain: {local_batch_size: 8}\n'


@pytest.mark.parametrize(
    'text, message',
    [
        *table(r"""
schedule: {warmup_epoch: 5} | schedule.warmup_epoch: unknown key; did you mean warmup_epochs?
shedule: {base_lr: 5} | shedule: unknown section; did you mean schedule?
- 1 | got list, expected sections
train: !!python/object/apply:os.system [ls] | got the tag tag:yaml.org,2002:python/object/
run: {seed: !!int 010} | got the tag tag:yaml.org,2002:int, expected plain values
run: [a | not a valid YAML file
run: {dir: [&a [x], &b [*a, *a]]} | got the alias *a, expected explicit values
run: {<<: {dir: x}} | run.<<: unknown key
run: {seed: 1, seed: 2} | seed: occurs on line 1 and again on line 1
"""),
        ('train: [' + 'x, ' * 100 + ']', "train: got ['x', 'x'"),
        ('run: {dir: ' + '[' * 100_000, 'nested deeper than 8'),
        ('run: {dir: "' + 'x' * (1 << 18) + '"}', 'is larger than'),
        ('run:\n  dir: x\n  seed: 1\n  dir: y', 'dir: occurs on line 2 and again on line 4'),
        ('train: 1\nrun: 1\ntrain: 2', 'train: occurs on line 1 and again on line 3'),
        ('? [a]\n: b', 'unhashable key'),
        (None, 'c.yaml: cannot read the configuration'),
    ],
)
def test_errors_in_a_file(tmp_path, text, message):
    path = tmp_path / 'c.yaml'
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_yaml(path)
    assert message in str(e.value) and str(path) in str(e.value) and '\n' not in str(e.value)
    assert len(str(e.value)) < 1000


CLOSED = '--run.submission_division=closed'


@pytest.mark.parametrize(
    'words, message',
    [
        *table("""
--train.eval_offset=4 | train.eval_offset: got 4, expected 0 to 3
--train.target_accuracy=74.9 | expected a fraction such as 0.749
--train.precision=float16 | expected float32 or bfloat16 on a CPU
--train.precision=bfloat16 --train.device=gpu | expected float32 or float16 on a GPU
--data.decoder=mixed | nvJPEG needs train.device=gpu
--model.layout=NHWC | expected NCHW
--schedule.warmup_epochs=90 | expected less than decay_epochs=90.0
--data.resize_shorter=200 | expected at least image_size=224
--data.min_area=0.5 --data.max_area=0.4 | expected min_area <= max_area
--data.std=[1,0,1] | data.std: got 0.0, expected a number above 0
--train.max_epochs=100001 | got 100001, expected a number above 0, up to
--schedule.base_lr=.inf | schedule.base_lr: got inf, expected a number above 0
--schedule.base_lr=1e60 | got 1e+60, expected 0 or a magnitude from 1e-30 to
--optimizer.last_layer_lr_factor=1e-60 | factor: got 1e-60, expected 0 or
--data.mirror=alternating --data.mirror_probability=0.3 | got 0.3 with mirror=alternating
--optimizer.name=lars --optimizer.nesterov=true | expected false, or name=sgd
--data.sizes=[0] | data.sizes: got 0, expected 1 to 8,192
--data.crop_padding=8193 | data.crop_padding: got 8193, expected 0 to 8,192
--data.eval_size=300 | resize_shorter: got 256, expected at least eval_size=300
--train.ema=1 | train.ema: got 1.0, expected a fraction from 0 to below 1
--data.sizes=[160,224] --model.name=vgg16 | got other sizes than image_size=224 for vgg16
--run.stop_when_behind=true --model.name=resnet101 | only ResNet-50 on all of ImageNet
--model.name=resnet51 | model.name: got resnet51, expected resnet18,
--train.precision=fp16 | got fp16, expected float32, bfloat16 or float16; see
--train.max_epochs=1.5 | got 1.5, expected a whole number or null; see
--data.mean=[a,b] | data.mean: got ['a', 'b'], expected a list of 3 numbers; see
--telemetry=1 | --telemetry: got 1, expected true, false or null; see
"""),
        *(
            (f'--data.last_batch=wrap {CLOSED} {words}', f'closed division, expected {rule}')
            for words, rule in table("""
--optimizer.nesterov=true | false
--data.mirror=alternating | random
--data.last_batch=weight | wrap
--data.sizes=[160,192] | []
--data.eval_size=160 | null
--data.eval_flip=true | false
--train.ema=0.99 | null
--optimizer.last_layer_lr_factor=0.1 | 1
--optimizer.name=lars --optimizer.lars_epsilon=1e-6 | 0
--model.name=resnet101 | resnet50
--data.image_size=192 | 224
""")
        ),
        *(
            (f'--data.{key}={value}', f'data.{key}: got {value}, expected 1 to 8,192')
            for key in ('image_size', 'eval_size', 'resize_shorter')
            for value in (-1, 0, 8193, 4_000_000_000)
        ),
        ('--run.dir=a\x1b[2J', 'run.dir: got '),
        *(
            (f'--run.trace={text}', f'run.trace: got {text}, expected STEPS@FIRST, such as 20@100')
            for text in ('20', '0@5', '5@0', '10001@1', '2@x', '２@5')
        ),
    ],
)
def test_errors_on_the_command_line_are_one_line(words, message):
    with pytest.raises(ConfigError) as e:
        resolve_config(None, [*BATCH, *words.split()], PARSER)
    assert message in str(e.value) and '\n' not in str(e.value)


def test_missing_batch_size_is_named_with_an_example():
    with pytest.raises(ConfigError, match='set --train.global_batch_size, such as 256'):
        resolve_config(None, [], PARSER)


def config_of(tmp_path, section, key, value, is_option):
    """Return the configuration with a value in a file or in an option."""
    (tmp_path / 'c.yaml').write_text('' if is_option else f'{section}: {{{key}: {value}}}\n')
    words = [f'--{section}.{key}={value}'] if is_option else []
    return resolve_config(tmp_path / 'c.yaml', [*BATCH, *words], PARSER)


@pytest.mark.parametrize('is_option', [False, True], ids=['file', 'option'])
@pytest.mark.parametrize(
    'key, read, refused',
    json_table("""
"run.seed"           | {"010": 10, "-0": 0, "+5": 5, "~": null, "null": null} | \
    "1:30 12:30:45 0o10 1_000 0x10 0b11 1e3 5.0"
"run.telemetry"      | {"true": true, "False": false} | "yes on no 1"
"schedule.base_lr"   | {"1e-3": 0.001, "1e3": 1000, ".5": 0.5, "2": 2} | ""
"run.submission_org" | {"no": "no", "010": "010", "1:30": "1:30", "2026-11-25": "2026-11-25"} | ""
"run.submission_org" | {"1_000": "1_000", "1e-3": "1e-3"} | ""
"""),
)
def test_scalars_are_read_as_written_or_refused_by_name(tmp_path, key, read, refused, is_option):
    for value, expected in read.items():
        config = config_of(tmp_path, *key.split('.'), value, is_option)
        assert attrgetter(key)(config) == expected, value
    for value in refused.split():
        message = rf'{key}: got {re.escape(value)}, expected (a whole|true or)'
        with pytest.raises(ConfigError, match=message):
            config_of(tmp_path, *key.split('.'), value, is_option)


def test_every_yaml_file_is_read_by_one_loader():
    reading = re.compile(r'yaml\.(safe_load|load|full_load|unsafe_load|compose|parse)')
    modules = (ROOT / 'mlperf_rn50').rglob('*.py')
    assert [p.name for p in modules if reading.search(p.read_text())] == ['config_file.py']


# --- paths


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.chdir(tmp_path)
    return tmp_path / 'home'


@pytest.mark.parametrize('is_option', [False, True], ids=['file', 'option'])
def test_home_is_expanded_and_variables_are_refused_in_paths(tmp_path, home, is_option):
    def path(section, key, value):
        return getattr(getattr(config_of(tmp_path, section, key, value, is_option), section), key)

    for section, key in (('run', 'dir'), ('data', 'dir'), ('train', 'init_weights')):
        assert path(section, key, '~/x') == f'{home}/x'
    assert path('run', 'reference', '[~/a, b/~]') == (f'{home}/a', 'b/~')
    for value in ('$HOME/runs', '${HOME}/runs', '/scratch/$USER/runs', 'runs_$USER'):
        with pytest.raises(
            ConfigError, match=r'got the variable \$\{?(HOME|USER)\}?, expected its value'
        ):
            path('run', 'dir', f'"{value}"' if not is_option else value)
    assert path('run', 'dir', '$(id) $5 a$') == '$(id) $5 a$'
    (tmp_path / '$HOME').mkdir()
    assert path('run', 'dir', '$HOME') == '$HOME'  # a folder of this name exists


@pytest.mark.parametrize(
    'words',
    """report X
report x --out=X
check X
watch X --once
package --check X
prepare digits --out=X
prepare --verify=X
package x --out=X --org a --system b
export X
classify x X
recipe --compare=X
evaluate X
predict X --layouts 1x1
train --config=X
train --resume X
doctor --config X
bench train --config=X""".splitlines(),
)
def test_paths_of_every_command(home, words):
    for path, code, text in (('$HOME/x', 2, 'got the variable $HOME, expected'), ('~/x', None, '')):
        done = call(*words.replace('X', path).split())
        assert code in (done.returncode, None) and text in done.stderr and '~' not in done.stderr
    assert not (home.parent / '~').exists()


TEXTS = [
    (name, f.name)
    for name, section in SECTIONS.items()
    for f in dataclasses.fields(section)
    if f.type in (str, str | None) and f.name != 'trace'
]
CONTROLS = st.sampled_from(['Cc', 'Cs', 'Zl', 'Zp']).flatmap(
    lambda kind: st.characters(categories=[kind])
)


def with_text(key, value):
    """Return a valid configuration with one text replaced."""
    (section, name), config = key, Config(train=TrainConfig(local_batch_size=8))
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


@given(st.sampled_from(TEXTS), st.text(max_size=5), CONTROLS, st.text(max_size=5))
def test_control_characters_are_refused_in_every_text(key, before, control, after):
    with pytest.raises(ConfigError) as e:
        check_values(with_text(key, before + control + after))
    assert '.'.join(key) in str(e.value) and all(c.isprintable() for c in str(e.value))


@given(
    st.sampled_from(TEXTS),
    st.text(st.characters(exclude_categories=['C', 'Zl', 'Zp']))
    | st.text(st.sampled_from('0123456789.eE+-_:xobnyiaf~'), max_size=6),
)
def test_all_other_texts_are_accepted_and_read_back(key, value):
    assume(value or '.'.join(key) != 'run.dir')
    config = with_text(key, value)
    check_values(config)
    with tempfile.NamedTemporaryFile('w', encoding='utf-8') as file:
        file.write(render_yaml(config))
        file.flush()
        assert load_yaml(Path(file.name)) == to_tree(config)


def test_error_of_a_deeply_nested_tree_is_one_line():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ConfigError, match='^best.json: .{,1000}$'):
        resolve_tree({'data': {'mean': deep}}, 'best.json', BATCH, PARSER)


def test_numbers_have_bounds():
    """Every number key has bounds, without which any number would be accepted."""
    without = [
        f'{name}.{f.name}'
        for name, section in SECTIONS.items()
        for f in dataclasses.fields(section)
        if {int, float} & {f.type, *get_args(f.type)} and 'bounds' not in f.metadata
    ]
    assert not without
