"""Write the manual page docs/mlperf-rn50.1 from the parsers of the commands; a test compares the two.

Usage: python docs/make_man.py > docs/mlperf-rn50.1
"""
from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction

from mlperf_rn50 import __version__
from mlperf_rn50.cli import whole_parser
from mlperf_rn50.config import SECTIONS

_ENVIRONMENT = {
    'NO_COLOR': 'If set to any value, output has no colour.',
    'FORCE_COLOR': 'If set to any value and NO_COLOR is not set, output to pipes and files has colour.'}


def escape(text: str) -> str:
    """Escape text for roff, so that no line is a request and minus signs stay ASCII."""
    lines = text.replace('\\', '\\e').replace('-', '\\-').splitlines()
    return '\n'.join(f'\\&{line}' if line[:1] in ('.', "'") else line for line in lines)


def verbatim(text: str) -> str:
    """Render text without reflowing its lines."""
    return f'.PP\n.nf\n{escape(text)}\n.fi'


def is_key(action: Action) -> bool:
    """Return True for a key of the configuration."""
    section, _, name = action.dest.partition('.')
    return section in SECTIONS and bool(name)


def render_action(action: Action, parser: ArgumentParser) -> str:
    """Render the syntax and meaning of an argument."""
    formatter = parser._get_formatter()
    value = formatter._format_args(action, action.dest.rpartition('.')[2].upper())
    names = ', '.join(f'\\fB{escape(name)}\\fR' for name in action.option_strings)
    value = escape(value).replace(',', ',\\:')  # allow line breaks in long lists of choices
    typed = f'{names} \\fI{value}\\fR' if value else names
    return f'.TP\n{typed.strip()}\n{escape(formatter._expand_help(action))}'


def shown_actions(parser: ArgumentParser) -> list[Action]:
    """Return the arguments of a parser that the page describes."""
    return [a for a in parser._actions if a.help and a.help != SUPPRESS and a.dest != 'help'
            and not isinstance(a, _SubParsersAction)
            and not (a.dest in SECTIONS and a.metavar == 'CONFIG')]  # a whole configuration section


def render_command(name: str, parser: ArgumentParser) -> list[str]:
    """Render the syntax, arguments and examples of a command."""
    actions = shown_actions(parser)
    formatter = parser._get_formatter()
    values = ' '.join(formatter._format_args(a, a.dest) for a in actions if not a.option_strings)
    lines = [f'.SS {name}', f'\\fBmlperf\\-rn50 {name}\\fR [OPTIONS...] {escape(values)}'.strip(), '.PP',
             escape(parser.description or '')]
    lines += [render_action(a, parser) for a in actions if not is_key(a)]
    if any(map(is_key, actions)):
        lines += ['.PP', 'Every key of the configuration is also an option, see CONFIGURATION.']
    return [*lines, verbatim(parser.epilog or '')]


def render_page() -> str:
    """Render the whole page."""
    parser = whole_parser()
    commands = next(a for a in parser._actions if isinstance(a, _SubParsersAction)).choices
    title, _, codes = (parser.epilog or '').partition('exit codes: ')
    examples = title.partition('examples:\n')[2].partition('\n\n')[0]
    lines = [f'.TH MLPERF\\-RN50 1 "" "mlperf\\-rn50 {__version__}" "User Commands"', '.nh', '.ad l', '.SH NAME',
             f'mlperf\\-rn50 \\- {escape(parser.description or "")}', '.SH SYNOPSIS',
             escape(parser.usage or '').replace('mlperf\\-rn50', '\\fBmlperf\\-rn50\\fR', 1), '.SH OPTIONS']
    lines += [render_action(a, parser) for a in shown_actions(parser)]
    lines.append('.SH COMMANDS')
    for name, command in commands.items():
        lines += render_command(name, command)
    lines += ['.SH CONFIGURATION',
              'Values come from the defaults, then from the file given with \\fB\\-\\-config\\fR, then from options.']
    train = commands['train']
    for section in SECTIONS:
        lines.append(f'.SS {section}')
        lines += [render_action(a, train) for a in train._actions if is_key(a) and a.dest.startswith(f'{section}.')]
    lines += ['.SH EXIT STATUS', escape(codes), '.SH ENVIRONMENT']
    lines += [f'.TP\n\\fB{name}\\fR\n{escape(text)}' for name, text in _ENVIRONMENT.items()]
    return '\n'.join([*lines, '.SH EXAMPLES', verbatim(examples)]) + '\n'


if __name__ == '__main__':
    print(render_page(), end='')
