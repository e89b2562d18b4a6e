"""Command line. Each command is a module of this folder; main() prints the error of a failed
command.

The docstring of a module is the help of its command; its first line is the summary in the list of
commands. The module has make_parser() or add_options(parser), and run(argv), which returns the exit
code. Shared code is in the modules output, parsers, ranks, saved_weights and terminal.
"""

# ruff: noqa: E402
import signal

# Until main() handles Ctrl-C, the imports would print a traceback; the default action ends the
# process silently. If it is ignored, as under nohup, it stays so.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
import errno
import importlib
import io
import logging
import os
import re
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn, TextIO

from mlperf_rn50.cli.parsers import config_help, config_parser
from mlperf_rn50.cli.terminal import has_colour, paint
from mlperf_rn50.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    RankLost,
    RunFailed,
    UserError,
    nearest,
)
from mlperf_rn50.files import DISK_FAULTS
from mlperf_rn50.parser import Parser
from mlperf_rn50.system.launcher_env import (
    launched_rank,
    launched_size,
    print_stderr,
    rank_name,
    settle_variables,
)
from mlperf_rn50.system.out_of_memory import explain_error
from mlperf_rn50.system.signals import (
    END_SIGNALS,
    catch,
    end_at_once,
    has_interrupt,
    interrupt,
    is_interrupted,
    report_lost,
)
from mlperf_rn50.text import first_paragraph, printable

if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

COMMANDS = tuple(
    'bench check classify completion doctor evaluate export launch package predict prepare recipe '
    'report sweep train watch why'.split()
)
# Commands whose packages read no variables of MXNet, except for why --probe.
_READERS = 'check completion package predict recipe report watch why'.split()
_DESCRIPTION = 'MLPerf time-to-accuracy runner for ResNet-50 v1.5 on MXNet Gluon.'
# of a path that the user gave or named in a file; others are of a disk, or of this program
_PATH_FAULTS = (
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
)
_EPILOG = """examples:
  mlperf-rn50 prepare digits --out data/digits
  mlperf-rn50 train --config launch/configs/digits_cpu.yaml --dry-run
  mpirun -np 2 mlperf-rn50 train --config launch/configs/digits_cpu.yaml
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 report logs/digits_sweep

For the options of a command, run mlperf-rn50 COMMAND --help.

exit codes: 0 success, 1 failed run or check, 2 invalid arguments or input, 75 interrupted and
resumable, 130 ended at once"""
# Import and display names of optional packages, by extra. Horovod has no extra, as pip builds it
# without MXNet support.
EXTRAS = {
    'cpu': {
        'mxnet': 'MXNet',
        'nvidia': 'DALI',
        'PIL': 'Pillow',
        'docstring_parser': 'docstring-parser',
        'imagesize': 'imagesize',
        'jsonargparse': 'jsonargparse',
        'mlperf_compliance': 'mlperf-compliance',
        'numpy': 'NumPy',
        'psutil': 'psutil',
        'pynvml': 'nvidia-ml-py',
        'tensorboardX': 'tensorboardX',
        'tqdm': 'tqdm',
    },
    'check': {'mlperf_logging': 'mlperf-logging'},
    'demo': {'sklearn': 'scikit-learn'},
    'export': {'onnx': 'ONNX', 'onnxruntime': 'ONNX Runtime'},
    '': {'horovod': 'Horovod'},
}


def _command(name: str) -> ModuleType:
    return importlib.import_module(f'{__name__}.{name}')


def _summary(name: str) -> str:
    return first_paragraph(_command(name).__doc__)


class _MainParser(Parser):
    """Parser of the arguments before the command. Only its help imports all commands, in order to
    list them."""

    def __init__(self) -> None:
        super().__init__(
            'mlperf-rn50',
            _DESCRIPTION,
            _EPILOG,
            usage='mlperf-rn50 [--version] [--debug] COMMAND [OPTIONS...]',
        )
        self.add_argument(
            '--version',
            action='store_true',
            help='print the versions of the program and its packages, and the processor',
        )
        self.add_argument('--debug', action='store_true', help='show the traceback of an error')

    def format_help(self) -> str:
        rows = ''.join(f'  {name:12}{_summary(name)}\n' for name in COMMANDS)
        self.epilog = f'commands:\n{rows}\n{_EPILOG}'
        return super().format_help()


def whole_parser() -> ArgumentParser:
    """Return a parser with all commands and their options; commands whose packages are missing have
    no options."""
    parser = _MainParser()
    commands = parser.add_subparsers(metavar='COMMAND', parser_class=ArgumentParser)
    for name in COMMANDS:
        commands.add_parser(name, help=_summary(name))
        with suppress(ModuleNotFoundError):
            command = _command(name)
            if hasattr(command, 'add_options'):
                commands._name_parser_map[name] = config_parser(name, command.add_options)
            else:
                commands._name_parser_map[name] = command.make_parser()
    return parser


def _run(argv: Sequence[str]) -> int:
    """Run the command that the arguments name and return its exit code."""
    if argv[:1] == ['help']:
        argv = [*argv[1:2], '--help', *argv[2:]]
    place = next((i for i, word in enumerate(argv) if not word.startswith('-')), len(argv))
    parser = _MainParser()
    if parser.parse_args(argv[:place]).version:
        from mlperf_rn50.system.environment import render_stack

        print(render_stack())
        return EXIT_OK
    if place == len(argv):
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if argv[place] not in COMMANDS:
        raise ConfigError(
            f'{argv[place]}: unknown command{nearest(argv[place], COMMANDS)}; expected one of '
            f'{", ".join(COMMANDS)}'
        )
    try:
        command = _command(argv[place])
        words = argv[place + 1 :]
        if hasattr(command, 'add_options') and {'-h', '--help'} & {*words}:
            print(config_help(argv[place], command, words), end='')
            return EXIT_OK
        if argv[place] not in _READERS or '--probe' in words:
            settle_variables(os.environ, starts_ranks=argv[place] in ('launch', 'sweep'))
        return command.run(words)
    except (ImportError, OSError) as e:
        if missing := explain_missing(e):
            raise missing from e
        raise


def explain_missing(error: ImportError | OSError) -> UserError | None:
    """Return an error that explains how to install a package or library; None for a module not in
    EXTRAS, which is a bug, and for other errors."""
    if library := re.match(r'(\S+\.so\S*): cannot open shared object file', str(error)):
        return RunFailed(f'{library[1]}: not found on this host; {_fix_of_library(library[1])}')
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or '').partition('.')[0]
    for extra, packages in EXTRAS.items():
        if module in packages:
            # training also needs Horovod
            pip = f" or pip install '.[{extra}]'" if extra not in ('', 'cpu') else ''
            return UserError(
                f'{packages[module]} is not installed; in the checkout, run launch/setup.sh{pip}'
            )
    return None


def _fix_of_library(name: str) -> str:
    if name != 'libcuda.so.1':
        return 'run launch/setup.sh --check'
    return (
        'MXNet for GPUs needs the NVIDIA driver; install it, or start the container with GPUs '
        '(docker run --gpus all)'
    )


def _explain_path(error: Exception) -> UserError | None:
    """Return the line for a path that the system refuses; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _PATH_FAULTS:
        return None
    if error.filename is None and error.errno == errno.ENOENT:
        text = 'the current folder has been deleted; change to another one'
    else:
        text = f'{error.filename}: {error.strerror}; correct the path or its permissions'
    # The same fault in a rank may be of a network file system, and a restart may help.
    return UserError(text) if launched_size() is None else RunFailed(text)


def _open_streams() -> None:
    """Open those of stdin, stdout and stderr that the caller has closed. Otherwise a file of the
    run would get the number of one, and with it the messages of libraries."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout = sys.stdout or open(os.devnull, 'w')
    sys.stderr = sys.stderr or open(os.devnull, 'w')


def _drop(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the interpreter does not try to write the rest when
    it exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(error: UserError) -> None:
    """Print an error on one line. Higher ranks wait longer, so that the lowest prints first; its
    exit ends them."""
    try:
        rank = launched_rank()
    except UserError:  # the rank itself may be invalid
        rank = 0
    delay_s = 1.5 + 0.5 * min(rank, 10) if rank else 0.0
    if isinstance(error, RankLost):  # the lost rank may still report its own error
        delay_s += 2
    time.sleep(delay_s)
    where = error.where or (f'{rank_name()}: ' if rank else '')
    name = paint('mlperf-rn50:', 'bad') if has_colour(sys.stderr) else 'mlperf-rn50:'
    try:
        print_stderr(f'{name} {where}{printable(str(error))}')
    except OSError:  # the exit code still reports the failure
        _drop(sys.stderr)


def _leave(code: int) -> int:
    """Return the exit code; if there are other ranks, exit at once, because Horovod's shutdown
    would wait for them."""
    if 'horovod.mxnet' in sys.modules and launched_size() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _die_of_pipe() -> NoReturn:
    """Exit silently by SIGPIPE, as programs do when their reader, such as head, has closed the
    pipe."""
    _drop(sys.stdout)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])
    signal.raise_signal(signal.SIGPIPE)
    os._exit(EXIT_FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, flush its output and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal encoding may lack characters
            stream.reconfigure(errors='backslashreplace')
    # without HOME and an entry in /etc/passwd; matplotlib requires a home folder
    if os.path.expanduser('~') == '~':
        os.environ['HOME'] = os.devnull
    os.environ.pop('MPLBACKEND', None)  # matplotlib refuses an unknown one; files need none
    # matplotlib warns if it cannot write to the home folder, or takes long to build a list of
    # fonts.
    logging.getLogger('matplotlib').setLevel(logging.ERROR)
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
            if is_interrupted():
                end_at_once()
    except KeyboardInterrupt:
        end_at_once()
    except BrokenPipeError:
        _die_of_pipe()
    except OSError as e:
        _drop(sys.stdout)
        _print_error(RunFailed(f'cannot write the output: {e.strerror}'))
        return _leave(EXIT_FAILED)


def _main(argv: list[str]) -> int:
    """Run a command, print its error and return its exit code; raise OSError if the output cannot
    be written."""
    # Signals that the launcher blocked stay blocked until the run handles stop requests.
    catch(interrupt, END_SIGNALS, unblock=False)
    sys.unraisablehook = report_lost
    try:
        return _run(argv)
    except UserError as e:
        if '--debug' in argv:
            traceback.print_exc()
        _print_error(e)
        return _leave(e.exit_code)
    except Exception as e:
        if has_interrupt(e):  # a package failed to clean up after Ctrl-C
            end_at_once()
        # An error of stdout or stderr names no file.
        is_disk_fault = isinstance(e, OSError) and e.errno in DISK_FAULTS and e.filename is None
        if is_disk_fault or isinstance(e, BrokenPipeError):
            raise
        explanation, path_error = explain_error(e), _explain_path(e)
        if not (explanation or path_error) or '--debug' in argv:
            traceback.print_exc()
        if path_error:
            _print_error(path_error)
            return _leave(path_error.exit_code)
        if explanation:
            _print_error(RunFailed(explanation))
            end_at_once(EXIT_FAILED)  # without memory, a normal exit would print further errors
        return _leave(EXIT_FAILED)
