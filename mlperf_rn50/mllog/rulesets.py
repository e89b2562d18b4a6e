"""Whose rules a log can be held against; light, as the command line lists them."""
from argparse import ArgumentTypeError

from mlperf_rn50.errors import nearest

V05 = 'v0.5'
RULESETS = (V05, '0.6.0', '0.7.0', '1.0.0', '1.1.0', '2.0.0', '2.1.0', '3.0.0', '3.1.0', '4.0.0')
DIVISIONS = ('open', 'closed')
# The round that a submission is for, and the rules of the checkers for it.
ROUNDS = {V05: V05, **{f'v{r[:3]}': r for r in RULESETS[1:]}}
# The rounds whose layout of a submission is written and checked; those before take no submissions any more.
PACKAGED = tuple(name for name in ROUNDS if name >= 'v1.0')
# For --help.
WRITTEN = ', '.join([V05, *(f'{ruleset} or {name}' for name, ruleset in ROUNDS.items() if ruleset != V05)])


def parse_ruleset(text: str) -> str:
    """The ruleset of a round, as 4.0.0, v4.0.0, v4.0 or 4.0; ArgumentTypeError names the one nearest to another."""
    word = text.strip().lower()
    number = word.removeprefix('v')
    found = ROUNDS.get(f'v{number.removesuffix(".0") if number.count(".") == 2 else number}')
    if found is None:
        raise ArgumentTypeError(f'got {text!r:.40}, expected a round such as 4.0.0 or v4.0'
                                f'{nearest(word, [*RULESETS, *ROUNDS]) or ", from v0.5 to v4.0"}')
    return found


def parse_round(text: str) -> str:
    """Return a round of PACKAGED, however it is written; ArgumentTypeError names the nearest, or all of them."""
    ruleset = parse_ruleset(text)
    name = next(name for name, its in ROUNDS.items() if its == ruleset)
    if name not in PACKAGED:
        raise ArgumentTypeError(f'got {text!r:.40}, expected a round that is packaged: {", ".join(PACKAGED)}')
    return name
