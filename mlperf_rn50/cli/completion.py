"""Print a shell completion script for commands, options, values and files, in bash also of
published sets.

examples:
  mlperf-rn50 completion bash > ~/.local/share/bash-completion/completions/mlperf-rn50
  mlperf-rn50 completion zsh > ~/.zfunc/_mlperf-rn50   (~/.zfunc must be in $fpath before compinit)
  mlperf-rn50 completion fish > ~/.config/fish/completions/mlperf-rn50.fish
  source <(mlperf-rn50 completion bash)                  (only in this shell, also for launch/*.sh)

The folder of the file must exist. The script matches this version of the program; print it again
after an update.
"""

from argparse import SUPPRESS, ArgumentParser, _SubParsersAction
from collections.abc import Sequence
from typing import Any

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import EXIT_OK
from mlperf_rn50.mllog.rulesets import ROUNDS
from mlperf_rn50.parser import Parser, add_option

# Metavars or keys of arguments that take folders, files or configuration keys.
_FOLDERS = {'DIR', 'run.dir', 'data.dir'}
_FILES = {
    *('CONFIG', 'FILE', 'IMAGE', 'PATH', 'TREE'),
    *('RUN', 'RUNS', 'RUN_FOLDER', 'RUN|WEIGHTS'),
    'train.init_weights',
}
_KEYS = {'KEY', 'KEYS'}
# functions by key
_PUBLISHED = {'paths': '_mlperf_rn50_file_or_published', 'sources': '_mlperf_rn50_file_or_system'}
_BASH = """
_mlperf_rn50_names='{names}'
# WORD NAMES, each after a space; prints the next parts, or the first that differ
_mlperf_rn50_next() {{
    local word=$1 found
    while found=$(compgen -W "$2" -- "$word" | grep -E "^.{{${{#word}}}}[^/]+/?$") &&
          [[ $found == */ && $found != *$'\\n'* ]]; do
        word=$found
    done
    [[ -z $found ]] || echo "$found"
}}
_mlperf_rn50_file_or_system() {{
    compgen -f -- "$1"; _mlperf_rn50_next "$1" "$_mlperf_rn50_names"
}}
_mlperf_rn50_file_or_published() {{
    compgen -f -- "$1"; _mlperf_rn50_next "$1" "published/${{_mlperf_rn50_names// / published/}}"
}}
# completes a script in launch/ as its command, and as train, which gets the other options
_mlperf_script() {{
    local name=${{1##*/}} typed=("${{COMP_WORDS[@]:1}}") index=$COMP_CWORD found=() command
    name=${{name%.*}} name=${{name/docker/local}}
    for command in "launch $name" train; do
        command=${{command/launch sweep/sweep}}
        COMP_WORDS=(mlperf-rn50 $command "${{typed[@]}}")
        COMP_CWORD=$((index + $(wc -w <<<"$command")))
        _shtab_mlperf_rn50
        found+=("${{COMPREPLY[@]}}")
    done
    COMPREPLY=("${{found[@]}}")
}}
complete -o bashdefault -F _mlperf_script \\
    {{,./}}launch/{{local,docker,mpirun,horovodrun,apptainer,kubernetes,sweep}}.sh
"""


def make_parser() -> Parser:
    parser = command_parser('completion', __doc__)
    add_option(parser, 'shell', 'shell that reads the script', choices=['bash', 'zsh', 'fish'])
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    import shtab

    from mlperf_rn50.analysis.sets.published import published_names
    from mlperf_rn50.cli import whole_parser

    parser = whole_parser()
    _complete_values(parser)
    print(shtab.complete(parser, options.shell))
    if options.shell == 'bash':
        names = [n.removeprefix('published/') for n in published_names()]
        print(_BASH.format(names=''.join(f' {n}' for n in names if n and ' ' not in n)))
    return EXIT_OK


def _complete_values(parser: ArgumentParser) -> None:
    """Mark for shtab which values the arguments of a parser and its subcommands take."""
    import shtab

    from mlperf_rn50.config import KEYS, SECTIONS

    action: Any  # shtab reads the attribute complete
    for action in parser._actions:
        names = {action.metavar, action.dest}
        if isinstance(action, _SubParsersAction):
            for subparser in action.choices.values():
                _complete_values(subparser)
        elif action.dest in SECTIONS and action.metavar == 'CONFIG':
            action.help = SUPPRESS  # takes a whole section as YAML, which users do not type
        elif action.dest in _PUBLISHED:
            action.complete = {**shtab.FILE, 'bash': _PUBLISHED[action.dest]}
        elif names & _FOLDERS:
            action.complete = shtab.DIRECTORY
        elif names & _FILES:
            action.complete = shtab.FILE
        elif names & _KEYS:
            action.choices = list(KEYS)
        elif 'ROUND' in names:
            action.choices = action.choices or list(ROUNDS)
        elif str(action.metavar).startswith('{'):  # a configuration key with fixed values
            action.choices = str(action.metavar).strip('{}').split(',')
