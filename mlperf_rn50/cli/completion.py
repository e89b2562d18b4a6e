"""Print the script with which a shell completes commands, options, values and files."""
from argparse import SUPPRESS, ArgumentParser, _SubParsersAction
from collections.abc import Sequence

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import EXIT_OK
from mlperf_rn50.parser import Parser

EPILOG = """examples:
  mlperf-rn50 completion bash > ~/.local/share/bash-completion/completions/mlperf-rn50
  mlperf-rn50 completion zsh > ~/.zfunc/_mlperf-rn50     (a folder that $fpath names before compinit)
  mlperf-rn50 completion fish > ~/.config/fish/completions/mlperf-rn50.fish
  source <(mlperf-rn50 completion bash)                  (in this shell alone)

The folder must be there. The script holds what this version takes: print it again after an update."""
# What arguments take, by their metavar or key.
_FOLDERS = {'DIR', 'run.dir', 'data.dir'}
_FILES = {'FILE', 'PATH', 'IMAGE', 'RUNS', 'RUN|WEIGHTS', 'train.init_weights', 'SOURCE', 'TREE'}
_KEYS = {'KEY', 'KEYS'}


def make_parser() -> Parser:
    parser = command_parser('completion', __doc__, EPILOG)
    parser.add_argument('shell', choices=['bash', 'zsh', 'fish'], help='whose script')
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
    """Tells shtab what the arguments of a parser, and of the commands below it, take."""
    import shtab

    from mlperf_rn50.config import SECTIONS, field_names
    for action in parser._actions:
        names = {action.metavar, action.dest}
        if isinstance(action, _SubParsersAction):
            for below in action.choices.values():
                _complete_values(below)
        elif action.dest in SECTIONS:  # a whole section in YAML, which nobody types
            action.help = SUPPRESS
        elif names & _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif names & _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif names & _KEYS:
            action.choices = [f'{name}.{key}' for name in SECTIONS for key in field_names(SECTIONS[name])]
        elif str(action.metavar).startswith('{'):  # of a key of the configuration
            action.choices = str(action.metavar).strip('{}').split(',')
