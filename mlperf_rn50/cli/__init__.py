"""The command line: a module of this folder per command, and the only place that prints an error.

A command is a module whose docstring opens with its one line of help, and which has make_parser() and
run(argv) -> exit code. parsers, ranks, terminal and weights are shared by several commands.
"""
import importlib
import io
import os
import signal
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn, TextIO

from mlperf_rn50.cli.terminal import has_colour, paint
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, RankLost, RunFailed, UserError, nearest
from mlperf_rn50.files import DISK_FAULTS
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.parser import Parser
from mlperf_rn50.system.launcher_env import launched_rank, launched_size, rank_name, say
from mlperf_rn50.system.out_of_memory import explain_error
from mlperf_rn50.train.watchdog.signals import END_SIGNALS, catch, end_at_once

COMMANDS = ('bench', 'check', 'classify', 'completion', 'doctor', 'evaluate', 'export', 'package', 'predict', 'prepare',
            'recipe', 'report', 'train', 'watch')
_DESCRIPTION = 'MLPerf time-to-accuracy runner for ResNet-50 v1.5 on MXNet Gluon.'
_EPILOG = """examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 train --config launch/configs/digits_cpu.yaml --dry-run
  mpirun -np 2 mlperf-rn50 train --config launch/configs/digits_cpu.yaml
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 report logs/digits_sweep

mlperf-rn50 COMMAND --help says more of each.

exit codes: 0 done, 1 the run failed or the check did not pass, 2 a mistake in what was asked for,
75 interrupted and resumable, 130 ended at once"""
# Packages that may be missing: as imported, and their names, by the extra that holds them. No extra holds Horovod: pip
# alone builds it without MXNet.
EXTRAS = {
    'cpu': {'mxnet': 'MXNet', 'nvidia': 'DALI', 'PIL': 'Pillow', 'docstring_parser': 'docstring-parser',
            'imagesize': 'imagesize', 'jsonargparse': 'jsonargparse', 'mlperf_compliance': 'mlperf-compliance',
            'numpy': 'NumPy', 'psutil': 'psutil', 'pynvml': 'nvidia-ml-py', 'tensorboardX': 'tensorboardX',
            'tqdm': 'tqdm'},
    'check': {'mlperf_logging': 'mlperf-logging'},
    'demo': {'sklearn': 'scikit-learn'},
    'export': {'onnx': 'ONNX', 'onnxruntime': 'ONNX Runtime'},
    '': {'horovod': 'Horovod'}}


def _command(name: str) -> ModuleType:
    return importlib.import_module(f'{__name__}.{name}')


def _summary(name: str) -> str:
    """What a command is for, in a line."""
    return (_command(name).__doc__ or '').partition('\n')[0]


class _OwnParser(Parser):
    """The parser of what stands before the command; its help lists the commands, which are imported for that."""

    def __init__(self) -> None:
        super().__init__('mlperf-rn50', _DESCRIPTION, _EPILOG,
                         usage='mlperf-rn50 [--version] [--debug] COMMAND [OPTIONS...]')
        self.add_argument('--version', action='store_true',
                          help='version, packages and processor, to name in a report')
        self.add_argument('--debug', action='store_true', help='show the traceback of an error')

    def format_help(self) -> str:
        """Return the help with a line for each command."""
        rows = ''.join(f'  {name:10} {_summary(name)}\n' for name in COMMANDS)
        self.epilog = f'commands:\n{rows}\n{_EPILOG}'
        return super().format_help()


def whole_parser() -> ArgumentParser:
    """Every command with its options, to complete and to document them; none for one whose packages are missing."""
    parser = _OwnParser()
    commands = parser.add_subparsers(metavar='COMMAND', parser_class=ArgumentParser)
    for name in COMMANDS:
        commands.add_parser(name, help=_summary(name))
        with suppress(ModuleNotFoundError):
            commands._name_parser_map[name] = _command(name).make_parser()
    return parser


def _run(argv: Sequence[str]) -> int:
    """Runs the command that the words name."""
    if argv[:1] == ['help']:
        argv = [*argv[1:2], '--help']
    place = next((i for i, word in enumerate(argv) if not word.startswith('-')), len(argv))
    parser = _OwnParser()
    own = parser.parse_args(argv[:place])
    if own.version:
        from mlperf_rn50.system.environment import render_stack
        print(render_stack())
        return EXIT_OK
    if place == len(argv):  # nothing was asked for: help, but not as an answer
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if argv[place] not in COMMANDS:
        raise ConfigError(f'{argv[place]}: unknown command{nearest(argv[place], COMMANDS)}; expected one of '
                          f'{", ".join(COMMANDS)}')
    try:
        return _command(argv[place]).run(argv[place + 1:])
    except ModuleNotFoundError as e:
        if missing := explain_missing(e):
            raise missing from e
        raise


def explain_missing(error: ModuleNotFoundError) -> UserError | None:
    """Return the mistake behind a module that is not there; None where it is ours or unknown, which is a bug."""
    module = (error.name or '').partition('.')[0]
    for extra, packages in EXTRAS.items():
        if module in packages:
            pip = f", or pip install 'mlperf-rn50[{extra}]'" if extra else ''
            return UserError(f'{packages[module]} is not installed; install it with launch/setup.sh in the '
                             f'checkout{pip}')
    return None


def _drop(stream: TextIO) -> None:
    """What could not be written is not tried again as the interpreter closes."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(error: UserError) -> None:
    """One line: what several ranks found is said by the lowest, whose end is theirs."""
    try:
        rank = launched_rank()
    except UserError:  # the error is about just that
        rank = 0
    time.sleep(0.5 * min(rank, 10) + 2 * isinstance(error, RankLost))  # a lost rank is given time to say why
    where = error.where or (f'{rank_name()}: ' if rank else '')
    name = paint('mlperf-rn50:', 'red') if has_colour(sys.stderr) else 'mlperf-rn50:'
    try:
        say(f'{name} {where}{printable(str(error))}')
    except OSError:  # the exit code remains
        _drop(sys.stderr)


def _leave(code: int) -> int:
    """Returns the exit code; among other ranks it leaves at once, as closing down would wait for their exchanges."""
    if 'horovod.mxnet' in sys.modules and launched_size() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _die_of_pipe() -> NoReturn:
    """Ends as programs do whose reader went away (| head): by SIGPIPE, without a word."""
    _drop(sys.stdout)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])
    signal.raise_signal(signal.SIGPIPE)
    os._exit(EXIT_FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and hands over all of its output; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that the terminal's encoding lacks ends no command
            stream.reconfigure(errors='backslashreplace')
    try:
        try:
            return _main(argv)
        finally:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
    except KeyboardInterrupt:
        end_at_once()
    except BrokenPipeError:
        _die_of_pipe()
    except OSError as e:
        _drop(sys.stdout)
        _print_error(RunFailed(f'cannot write the output: {e.strerror}'))
        return _leave(EXIT_FAILED)


def _main(argv: list[str]) -> int:
    """Run a command and print what went wrong; return its exit code. Raise OSError where the output is not taken."""
    catch(_interrupt, END_SIGNALS, unblock=False)  # a launcher's word waits until a run can stop by itself
    try:
        return _run(argv)
    except UserError as e:
        if '--debug' in argv:
            traceback.print_exc()
        _print_error(e)
        return _leave(e.exit_code)
    except BrokenPipeError:
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.errno in DISK_FAULTS and e.filename is None:  # of files, others say which
            raise
        said = explain_error(e)
        if not said or '--debug' in argv:  # a bug: show where, and still take the other ranks down
            traceback.print_exc()
        if said:
            _print_error(RunFailed(said))
            end_at_once(EXIT_FAILED)  # what has no memory does not close down without a word
        return _leave(EXIT_FAILED)
