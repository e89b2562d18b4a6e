"""Rulesets and rounds. This module has few imports, because the parsers of commands load it."""
from argparse import ArgumentTypeError

from mlperf_rn50.errors import nearest

V05 = 'v0.5'
RULESETS = (V05, '0.6.0', '0.7.0', '1.0.0', '1.1.0', '2.0.0', '2.1.0', '3.0.0', '3.1.0', '4.0.0')
DIVISIONS = ('open', 'closed')
ROUNDS = {V05: V05, **{f'v{r[:3]}': r for r in RULESETS[1:]}}  # ruleset of the checkers, by round
PACKAGED = tuple(name for name in ROUNDS if name >= 'v1.0')  # the package layout of earlier rounds is not supported
WRITTEN = ', '.join([V05, *(f'{ruleset} or {name}' for name, ruleset in ROUNDS.items() if ruleset != V05)])


def parse_ruleset(text: str) -> str:
    """Return the ruleset for 4.0.0, v4.0.0, v4.0 or 4.0. Raise ArgumentTypeError that suggests the nearest."""
    word = text.strip().lower()
    number = word.removeprefix('v')
    ruleset = ROUNDS.get(f'v{number.removesuffix(".0") if number.count(".") == 2 else number}')
    if ruleset is None:
        raise ArgumentTypeError(f'got {text!r:.40}, expected a round such as 4.0.0 or v4.0'
                                f'{nearest(word, [*RULESETS, *ROUNDS]) or ", from v0.5 to v4.0"}')
    return ruleset


def parse_round(text: str) -> str:
    """Return the round of PACKAGED that a text names in any spelling, otherwise raise ArgumentTypeError."""
    ruleset = parse_ruleset(text)
    name = next(name for name in ROUNDS if ROUNDS[name] == ruleset)
    if name not in PACKAGED:
        raise ArgumentTypeError(f'got {text!r:.40}, expected one of the rounds {", ".join(PACKAGED)}')
    return name
