"""Argument parser of all commands and launch scripts."""
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NoReturn

from mlperf_rn50.errors import option_error


class Parser(ArgumentParser):
    """A parser that raises ConfigError, accepts no abbreviations and prints examples verbatim."""

    def __init__(self, prog: str, description: str, epilog: str = '', **more: Any):
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False,
                         formatter_class=RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        raise option_error(message.removeprefix('argument '), self)
