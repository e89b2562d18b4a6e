"""The command line, and the only place that prints an error."""
import json
import os
import re
import signal
import sys
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace

import mlperf_rn50
from mlperf_rn50 import config as cfg
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, RankLost, RunFailed, UserError
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.system.launched import launched_rank, launched_size, rank_name
from mlperf_rn50.train.watch import STOP_SIGNALS, Position, watched

_DESCRIPTION = 'MLPerf time-to-accuracy runner for ResNet-50 v1.5 on MXNet Gluon.'
_EPILOG = """examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 train --config launch/configs/digits_cpu.yaml --dry-run
  mpirun -np 2 mlperf-rn50 train --config launch/configs/digits_cpu.yaml
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 report logs/digits_sweep

exit codes: 0 done, 1 the run failed or the check did not pass, 2 a mistake in what was asked for,
75 interrupted and resumable"""
_TRAIN_EPILOG = """examples:
  mlperf-rn50 train --config launch/configs/c4140_v100_4node.yaml --dry-run
  mpirun -np 2 mlperf-rn50 train --config launch/configs/digits_cpu.yaml --run.seed 1
  mpirun -np 2 mlperf-rn50 train --resume logs/digits_cpu

Defaults < --config FILE < options. A resumed run takes its configuration from its own folder."""
_PREPARE_EPILOG = """examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 prepare cifar10 --out data/cifar10
  mlperf-rn50 prepare imagenet --source /data/ILSVRC2012 --out data/imagenet
  mlperf-rn50 prepare folder --source pictures --out data/pictures   (pictures/{train,val}/<class>/*)"""
_CHECK_EPILOG = """examples:
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 check result_*.txt --ruleset v0.5
  mlperf-rn50 check result_0.txt --ruleset 4.0.0 --division open"""


_DOCTOR_EPILOG = """examples:
  mlperf-rn50 doctor
  mpirun -np 2 mlperf-rn50 doctor --config launch/configs/digits_cpu.yaml
  mlperf-rn50 doctor --config launch/configs/c4140_v100_1node.yaml --format json"""


_REPORT_EPILOG = """examples:
  mlperf-rn50 report logs/digits_sweep
  mlperf-rn50 report training_results_v0.7/NVIDIA --format json
  mlperf-rn50 report logs/c4140 --out logs/c4140/report --baseline 2x4

A run that did not converge is shown, never left out. Runs that differ in batch, optimizer, target or number of nodes
are refused in one folder."""


_BENCH_EPILOG = """examples:
  mlperf-rn50 bench train --models alexnet,resnet50 --batch-sizes 8,16 --steps 20
  launch/ranks.sh 2 mlperf-rn50 bench train --ranks 1,2 --precisions float32,bfloat16 --data.pad_to_4_channels true
  mlperf-rn50 bench data --config launch/configs/cifar10_cpu.yaml --threads 1,2 --batch-sizes 128
  launch/ranks.sh 2 mlperf-rn50 bench allreduce --batch-sizes 8
  mlperf-rn50 bench ops --batch-sizes 32 --precisions float32,bfloat16

Every option of train is one of bench, too: a bench runs the code of training with its configuration."""


_PACKAGE_EPILOG = """examples:
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission --round v0.5 --poc-email us@example.com

Results are copied byte for byte. A set that a rule refuses is refused, with the rule, and nothing is written."""


_BENCHES = ['train', 'data', 'allreduce', 'ops']


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Defaults beside the options, examples left as they are written."""


def _parser(**keys: Any) -> ArgumentParser:
    return ArgumentParser(exit_on_error=False, allow_abbrev=False, formatter_class=_HelpFormatter, **keys)


def _train_parser() -> ArgumentParser:
    parser = _config_parser()
    parser.description = 'Train until the target is reached, and log the run the MLPerf way.'
    parser.epilog = _TRAIN_EPILOG
    parser.add_argument('--resume', metavar='DIR', type=str, help='go on with the run in this folder')
    parser.add_argument('--elastic', action='store_true', help='--resume with another number of ranks than before')
    parser.add_argument('--dry-run', action='store_true', help='print the plan of the run and stop; reads no data')
    parser.add_argument('--print', metavar='KEY', action='append', type=str,
                        help='print the value of run.dir, for example, and stop; for scripts')
    parser.add_argument('--ranks', type=int, metavar='N', help='number of ranks for --dry-run')
    return parser


def _config_parser() -> ArgumentParser:
    """The options that make a configuration."""
    parser = _parser()
    parser.add_argument('--config', metavar='FILE', type=str, help='YAML file: only what differs from the defaults')
    parser.add_argument('--telemetry', metavar='BOOL', type=bool | None, help='the short form of --run.telemetry')
    for name, section in cfg.SECTIONS.items():
        parser.add_class_arguments(section, name)
    return parser


def _doctor_parser() -> ArgumentParser:
    parser = _train_parser()
    parser.description = 'Check every rank: program, packages, GPUs, data, disk, clocks, threads, network.'
    parser.epilog = _DOCTOR_EPILOG
    parser.add_argument('--format', choices=['table', 'json'], default='table', help='how to print the checks')
    parser.add_argument('--quiet', action='store_true', help='print what is not right, and the sum')
    return parser


def _bench_parser() -> ArgumentParser:
    parser = _config_parser()
    parser.description = 'Short measurements: training steps, input pipeline, all-reduce, operators.'
    parser.epilog = _BENCH_EPILOG
    # Not required by the parser, which also reads YAML files.
    parser.add_argument('kind', nargs='?', choices=_BENCHES, help='what is measured')
    parser.add_argument('--models', metavar='A,B', type=str, help='train: networks (default: model.name)')
    parser.add_argument('--precisions', metavar='A,B', type=str, help='train, ops (default: train.precision)')
    parser.add_argument('--inputs', metavar='A,B', type=str, default='synthetic', help='train: synthetic, real')
    parser.add_argument('--batch-sizes', metavar='N,M', type=str,
                        help='images per rank (default: train.local_batch_size, or 32)')
    parser.add_argument('--ranks', metavar='N,M', type=str, help='train: how many of the ranks started (default: all)')
    parser.add_argument('--threads', metavar='N,M', type=str, help='data: DALI threads (default: data.num_threads)')
    parser.add_argument('--caches', metavar='A,B', type=str, default='cold,warm', help='data: page cache')
    parser.add_argument('--node-images-per-s', metavar='X', type=float,
                        help='data: training speed of a node, for the storage it needs (default: the pipeline\'s)')
    parser.add_argument('--warmup-steps', metavar='N', type=int, default=10, help='steps before the clock starts')
    parser.add_argument('--steps', metavar='N', type=int, default=100, help='steps, batches or repetitions measured')
    parser.add_argument('--format', choices=['table', 'json'], default='table', help='how to print the results')
    return parser


def _prepare_parser() -> ArgumentParser:
    parser = _parser(description='Make RecordIO files and a manifest from images.', epilog=_PREPARE_EPILOG)
    parser.add_argument('dataset', choices=['digits', 'cifar10', 'imagenet', 'folder'], help='kind of the source')
    parser.add_argument('--out', metavar='DIR', type=str, required=True, help='where the files go')
    parser.add_argument('--source', metavar='PATH', type=str,
                        help='imagenet: folder with the two tars, or with train/ and val/; folder: the same; '
                             'cifar10: archive, .tgz or folder (fetched when not given)')
    parser.add_argument('--ground-truth', metavar='FILE', type=str,
                        help='imagenet: synset of each validation image, for a flat validation tar or folder')
    parser.add_argument('--name', type=str, help='folder: name of the data set, shown beside its accuracy')
    parser.add_argument('--resize-shorter', type=int, metavar='PIXELS',
                        help='re-encode with this shorter side (default: keep the files byte for byte)')
    parser.add_argument('--workers', type=int, metavar='N', help='processes (default: the cores of this machine)')
    parser.add_argument('--skip-corrupt', action='store_true', help='leave damaged images out and list them')
    parser.add_argument('--allow-partial', action='store_true', help='imagenet: accept another number of images')
    return parser


def _check_parser() -> ArgumentParser:
    from mlperf_rn50.mlperf.check import DIVISIONS, RULESETS
    parser = _parser(description='Run the official checkers on logs and say what each log can claim.',
                     epilog=_CHECK_EPILOG)
    parser.add_argument('files', nargs='+', metavar='FILE', type=str, help='result_<k>.txt')
    parser.add_argument('--ruleset', choices=RULESETS, help='default: every round whose lines the log holds')
    parser.add_argument('--division', choices=DIVISIONS, help='default: the one the log names')
    return parser


def _report_parser() -> ArgumentParser:
    parser = _parser(description='Epochs to converge, time to train and speed-up, from MLPerf logs of any round.',
                     epilog=_REPORT_EPILOG)
    parser.add_argument('paths', nargs='+', metavar='PATH', type=str,
                        help='log, or folder with result_<k>.txt in it or below it; a folder of logs is one system')
    parser.add_argument('--format', choices=['table', 'markdown', 'csv', 'json', 'html'], default='table',
                        help='what goes to the standard output')
    parser.add_argument('--out', metavar='DIR', type=str,
                        help='write report.html, report.json, report.csv, report.md and the pictures (SVG, PNG) there')
    parser.add_argument('--baseline', metavar='SYSTEM', type=str,
                        help='compare with this system (default: the smallest of each study)')
    return parser


def _package_parser() -> ArgumentParser:
    from mlperf_rn50.mlperf.package import RULESETS
    parser = _parser(description='Build a submission tree from five runs and have the official checkers look at it.',
                     epilog=_PACKAGE_EPILOG)
    parser.add_argument('runs', nargs='+', metavar='RUNS', type=str, help='folder of result_<k>.txt, or the five logs')
    parser.add_argument('--org', type=str, required=True, help='who submits')
    parser.add_argument('--system', type=str, required=True, help='name of the system')
    parser.add_argument('--out', metavar='DIR', type=str, required=True, help='where the tree of the organisation goes')
    parser.add_argument('--round', choices=list(RULESETS), default='v4.0', help='whose layout and rules')
    parser.add_argument('--poc-email', metavar='EMAIL', type=str, default='', help='v0.5: whom to ask')
    parser.add_argument('--redact', action='store_true',
                        help='leave host names and paths out of what is taken from env.json and config.yaml')
    return parser


_COMMANDS = {
    'train': (_train_parser, 'train until the target is reached'),
    'doctor': (_doctor_parser, 'check the machines before a run'),
    'bench': (_bench_parser, 'measure training steps, input pipeline, all-reduce, operators'),
    'prepare': (_prepare_parser, 'make RecordIO files from images'),
    'check': (_check_parser, 'run the official checkers on logs'),
    'report': (_report_parser, 'epochs to converge, time to train, speed-up'),
    'package': (_package_parser, 'build a submission tree and check it')}


def _top_parser(command: str | None) -> ArgumentParser:
    """The parser of a command; the others are named only, as building them all takes longer than most answers."""
    parser = _parser(prog='mlperf-rn50', description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument('--version', action='version', version=f'mlperf-rn50 {mlperf_rn50.__version__}')
    parser.add_argument('--debug', action='store_true', help='show the traceback of an error')
    commands = parser.add_subcommands(metavar='COMMAND')
    for name, (make_parser, text) in _COMMANDS.items():
        commands.add_subcommand(name, make_parser() if name == command else _parser(), help=text)
    return parser


def _option_error(message: str, argv: Sequence[str]) -> ConfigError:
    """The parser's complaint in one line, with the nearest option for a misspelt one."""
    text = re.sub(r'(?<=required: )\w+\.', '', ' '.join(message.split()))  # the command's own name
    if m := re.search(r'[Uu]nrecognized arguments: (\S+)', text):
        word = m[1].lstrip('-').partition('=')[0]
        known = [f'{s}.{k}' for s, section in cfg.SECTIONS.items() for k in cfg.field_names(section)]
        return ConfigError(f'{m[1]}: unknown option{cfg.nearest(word, known)}')
    return ConfigError(f'{text}; see mlperf-rn50 {argv[0] if argv else ""} --help')


def parse(argv: Sequence[str]) -> Namespace:
    """The command and its options.

    Raises:
        ConfigError: an option is unknown or its value has the wrong type.
    """
    try:
        return _top_parser(next((a for a in argv if a in _COMMANDS), None)).parse_args(list(argv))
    except ArgumentError as e:
        raise _option_error(str(e), argv) from e


def resolve_config(yaml_path: Path | None, argv: Sequence[str], parser: ArgumentParser | None = None) -> cfg.Config:
    """Defaults < YAML < command line, as one checked tree.

    Args:
        yaml_path: the configuration file, None for the defaults.
        argv: the options of the command.
        parser: of the command, train where it is None.

    Raises:
        ConfigError: a key, type or value is wrong.
    """
    parser = parser or _train_parser()
    tree = cfg.load_yaml(yaml_path) if yaml_path else {}
    try:
        base = parser.parse_object(tree, defaults=True)
    except ArgumentError as e:
        raise ConfigError(f'{yaml_path}: {" ".join(str(e).split())}') from e
    try:
        options = parser.parse_args(list(argv), namespace=base)
    except ArgumentError as e:
        raise _option_error(str(e), ['train']) from e
    sections = {name: section(**{k: tuple(v) if isinstance(v, list) else v for k, v in vars(options[name]).items()})
                for name, section in cfg.SECTIONS.items()}
    if options.telemetry is not None:
        sections['run'] = replace(sections['run'], telemetry=options.telemetry)
    result = cfg.Config(**sections)
    cfg.check_values(result)
    return result


def _run_train(options: Namespace, argv: Sequence[str]) -> int:
    from mlperf_rn50.train.plan import config_world_size, make_plan, render_plan
    if options.resume and options.config:
        raise ConfigError('--resume, --config: got both, expected one; a resumed run has its own configuration')
    if options.dry_run:
        config = resolve_config(Path(options.config) if options.config else None, argv)
        ranks = options.ranks or config_world_size(config) or 1
        print(cfg.render_yaml(config) + '\n' + render_plan(make_plan(config, ranks)))
        return EXIT_OK
    if options.print:
        config = _load_config(options, argv)[0]
        for key in options.print:
            print(_value_of(config, key))
        return EXIT_OK
    config, resume = _load_config(options, argv)
    # Asked to stop while it starts, it stops after its first step; StopRequest lets the signals in.
    return _in_rank(lambda position: _train(config, resume, options.elastic, position), config, signal.SIG_BLOCK)


def _in_rank(program: Callable[[Position], int], config: cfg.Config, stops: int = signal.SIG_UNBLOCK) -> int:
    """Runs this rank's part of a command, watched where a launcher started it.

    Signals that ask to stop end it, or wait (`stops`: SIG_BLOCK) until it lets them in.
    """
    signal.pthread_sigmask(stops, STOP_SIGNALS)
    # MXNet reads this once, when it is imported; unset, it spins as many threads as the machine has.
    os.environ.setdefault('OMP_NUM_THREADS', str(len(os.sched_getaffinity(0))))
    if config.train.device == 'cpu':  # a rank that waits must leave its core to the others: look for work every 5 ms
        os.environ.setdefault('HOROVOD_CYCLE_TIME', '5')
    return program(Position()) if launched_size() is None else watched(program, config.comm.stall_limit_s)


def _load_config(options: Namespace, argv: Sequence[str],
                 parser: ArgumentParser | None = None) -> tuple[cfg.Config, Any]:
    """The configuration of a run, and for one that is resumed its folder and checkpoint."""
    if not options.resume:
        return resolve_config(Path(options.config) if options.config else None, argv, parser), None
    from mlperf_rn50.train.run_folder import find_run
    resume = find_run(Path(options.resume))
    return resolve_config(resume[0].config, argv, parser), resume


def _value_of(config: cfg.Config, key: str) -> Any:
    """The value of 'section.key'; nothing for null.

    Raises:
        ConfigError: there is no such key.
    """
    section, _, name = key.partition('.')
    if section not in cfg.SECTIONS or name not in cfg.field_names(cfg.SECTIONS[section]):
        raise ConfigError(f'--print: got {key}, expected a section and a key, such as run.dir')
    value = getattr(getattr(config, section), name)
    return '' if value is None else value


def _train(config: cfg.Config, resume: Any, is_elastic: bool, position: Position) -> int:
    """One rank's part of a run."""
    from mlperf_rn50.train.comm import open_comm
    from mlperf_rn50.train.loop import render_outcome, train
    comm = open_comm(config.comm.compression)
    try:
        outcome = train(config, comm, position, resume, is_elastic)
    except UserError as e:
        e.where = f'{rank_name()}, {position}: ' if position.has_started else ''
        raise
    if comm.rank == 0:
        print(render_outcome(outcome, config), flush=True)
    comm.barrier()  # a launcher ends the other ranks when one leaves with a code other than 0
    return outcome.exit_code


def _run_doctor(options: Namespace, argv: Sequence[str]) -> int:
    has_config = bool(options.config or options.resume)
    if not has_config:  # any batch will do: nothing is trained
        argv = [*argv, '--train.local_batch_size=1']
    config, _ = _load_config(options, argv, _doctor_parser())
    return _in_rank(lambda _: _examine(config, has_config, options.format, options.quiet), config)


def _examine(config: cfg.Config, has_config: bool, output_format: str, is_quiet: bool) -> int:
    """One rank's part of the doctor."""
    from mlperf_rn50.system import doctor
    try:
        from mlperf_rn50.train.comm import open_comm
        from mlperf_rn50.train.examine import examine
        comm = open_comm(config.comm.compression)
    except (ImportError, OSError) as e:
        raise RunFailed(f'{rank_name()}: MXNet, DALI or Horovod does not import: {e}; run launch/setup.sh --check '
                        'there') from e
    rows, checks = examine(config, has_config, comm)
    if comm.rank == 0:
        if output_format == 'json':
            print(json.dumps({'passed': not doctor.has_failed(checks), 'checks': [asdict(c) for c in checks],
                              'ranks': rows}, indent=1), flush=True)
        else:
            print(doctor.render_checks(checks, is_quiet), file=sys.stderr if is_quiet else sys.stdout, flush=True)
    comm.barrier()
    return EXIT_FAILED if doctor.has_failed(checks) else EXIT_OK


def _run_bench(options: Namespace, argv: Sequence[str]) -> int:
    if not options.kind:
        raise ConfigError(f'bench: got nothing to measure, expected one of {", ".join(_BENCHES)}; '
                          'see mlperf-rn50 bench --help')
    for name in ('warmup_steps', 'steps'):
        if options[name] < (name == 'steps'):
            option, least = name.replace('_', '-'), int(name == 'steps')
            raise ConfigError(f'--{option}: got {options[name]}, expected {least} or more')
    if not options.config:  # the batch is an option of its own
        argv = [*argv, '--train.local_batch_size=32']
    config = resolve_config(Path(options.config) if options.config else None, argv, _bench_parser())
    return _in_rank(lambda position: _bench(config, options, position), config)


def _bench(config: cfg.Config, options: Namespace, position: Position) -> int:
    """One rank's part of a bench."""
    from mlperf_rn50.bench.program import run_bench
    text = run_bench(config, options, position)
    if text:
        print(text, flush=True)
    return EXIT_OK


def _run_prepare(options: Namespace) -> int:
    from mlperf_rn50.data.prepare import prepare
    return prepare(options)


def _run_check(options: Namespace) -> int:
    from mlperf_rn50.mlperf import check
    all_passed = True
    for name in options.files:
        path = Path(name)
        facts = check.find_facts(path)
        rulesets = (options.ruleset,) if options.ruleset else check.applicable_rulesets(facts)
        verdicts = check.check_log(path, rulesets, options.division)
        all_passed &= all(v.passed for v in verdicts)
        print(check.render_verdicts(path, facts, verdicts))
    return EXIT_OK if all_passed else EXIT_FAILED


def _run_report(options: Namespace) -> int:
    from mlperf_rn50.study import report_data, report_text
    from mlperf_rn50.study.scaling import make_studies
    from mlperf_rn50.study.systems import load_systems
    studies = make_studies(load_systems([Path(p) for p in options.paths]), options.baseline)
    if options.out:
        from mlperf_rn50.study.report_folder import dump_report
        print(f'mlperf-rn50: wrote {dump_report(studies, Path(options.out))}', file=sys.stderr)
        if options.format == 'html':
            return EXIT_OK
    if options.format == 'html':
        from mlperf_rn50.study.report_page import render_html
        from mlperf_rn50.study.report_plots import draw_study
        print(render_html(studies, [draw_study(s) for s in studies], Path.cwd()))
    else:
        print({'table': report_text.render_table, 'markdown': report_text.render_markdown,
               'csv': report_data.render_csv, 'json': report_data.render_json}[options.format](studies))
    return EXIT_OK


def _run_package(options: Namespace) -> int:
    from mlperf_rn50.mlperf import package
    from mlperf_rn50.study.systems import load_systems
    systems = load_systems([Path(p) for p in options.runs])
    if len(systems) != 1:
        raise UserError(f'RUNS: got {len(systems)} sets ({", ".join(s.name for s in systems)}), expected one')
    order = package.Order(options.org, options.system, options.round, Path(options.out), options.poc_email,
                          options.redact)
    made = package.make_package(systems[0].runs, order)
    print(package.render_package(made, order, systems[0].score_minutes))
    return EXIT_OK if made.home else EXIT_FAILED


def _print_error(error: UserError) -> None:
    """One line: what several ranks found is said by the lowest, whose end is theirs."""
    rank = launched_rank()
    time.sleep(0.5 * min(rank, 10) + 2 * isinstance(error, RankLost))  # a lost rank is given time to say why
    where = error.where or (f'{rank_name()}: ' if rank else '')
    print(f'mlperf-rn50: {where}{printable(str(error))}', file=sys.stderr, flush=True)


def _leave(code: int) -> int:
    """Returns the exit code; among other ranks it leaves at once, as closing down would wait for their exchanges."""
    if 'horovod.mxnet' in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(argv)
        command = options.subcommand
        if command == 'train':
            return _run_train(options.train, argv[argv.index('train') + 1:])
        if command == 'doctor':
            return _run_doctor(options.doctor, argv[argv.index('doctor') + 1:])
        if command == 'bench':
            return _run_bench(options.bench, argv[argv.index('bench') + 1:])
        return {'prepare': _run_prepare, 'check': _run_check, 'report': _run_report,
                'package': _run_package}[command](options[command])
    except UserError as e:
        if '--debug' in argv:
            traceback.print_exc()
        _print_error(e)
        return _leave(e.exit_code)
    except KeyboardInterrupt:
        return _leave(130)
    except BrokenPipeError:
        # The reader of our output went away (| head); that is not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USAGE
    except Exception:  # a bug: show where, and still take the other ranks down
        traceback.print_exc()
        return _leave(EXIT_FAILED)
