"""Print a shell completion script for commands, options, values and files.

examples:
  mlperf-rn50 completion bash > ~/.local/share/bash-completion/completions/mlperf-rn50
  mlperf-rn50 completion zsh > ~/.zfunc/_mlperf-rn50     (~/.zfunc must be in $fpath before compinit)
  mlperf-rn50 completion fish > ~/.config/fish/completions/mlperf-rn50.fish
  source <(mlperf-rn50 completion bash)                  (only in this shell)

The folder of the file must exist. The script matches this version of the program; print it again after an update.
"""
from argparse import SUPPRESS, ArgumentParser, _SubParsersAction
from collections.abc import Sequence

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import EXIT_OK
from mlperf_rn50.parser import Parser

# Metavars or keys of arguments that take folders, files or configuration keys.
_FOLDERS = {'DIR', 'run.dir', 'data.dir'}
_FILES = {'FILE', 'PATH', 'IMAGE', 'RUNS', 'RUN|WEIGHTS', 'train.init_weights', 'SOURCE', 'TREE'}
_KEYS = {'KEY', 'KEYS'}


def make_parser() -> Parser:
    parser = command_parser('completion', __doc__)
    parser.add_argument('shell', choices=['bash', 'zsh', 'fish'], help='shell that reads the script')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    import shtab

    from mlperf_rn50.cli import whole_parser
    parser = whole_parser()
    _complete_values(parser)
    print(shtab.complete(parser, options.shell))
    return EXIT_OK


def _complete_values(parser: ArgumentParser) -> None:
    """Mark for shtab which values the arguments of a parser and its subcommands take."""
    import shtab

    from mlperf_rn50.config import KEYS, SECTIONS
    for action in parser._actions:
        names = {action.metavar, action.dest}
        if isinstance(action, _SubParsersAction):
            for subparser in action.choices.values():
                _complete_values(subparser)
        elif action.dest in SECTIONS:  # takes a whole section as YAML, which users do not type
            action.help = SUPPRESS
        elif names & _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif names & _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif names & _KEYS:
            action.choices = list(KEYS)
        elif str(action.metavar).startswith('{'):  # a configuration key with fixed values
            action.choices = str(action.metavar).strip('{}').split(',')
