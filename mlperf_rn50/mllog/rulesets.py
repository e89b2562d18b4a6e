"""Rounds, such as v2.0, and rulesets of the checkers, such as 2.0.0. Option parsers load this, so
it imports little."""

from argparse import ArgumentTypeError
from collections.abc import Collection
from itertools import groupby

from mlperf_rn50.errors import nearest

V05 = 'v0.5'
RULESETS = (V05, '0.6.0', '0.7.0', '1.0.0', '1.1.0', '2.0.0', '2.1.0', '3.0.0', '3.1.0', '4.0.0')
DIVISIONS = ('open', 'closed')
ROUND_OF = {r: r if r == V05 else f'v{r[:3]}' for r in RULESETS}  # round of each ruleset
ROUNDS = {name: ruleset for ruleset, name in ROUND_OF.items()}
# round of a log in the format of v0.7 and later rounds, if no folder name contains it
LATER = 'v0.7+'


def parse_round(text: str) -> str:
    """Return a round, such as v2.0 for 2.0.0, v2.0.0, v2.0 or 2.0. Raise ArgumentTypeError for an
    unknown round."""
    word = text.strip().lower()
    number = word.removeprefix('v')
    name = f'v{number.removesuffix(".0") if number.count(".") == 2 else number}'
    if name not in (*ROUNDS, LATER):
        raise ArgumentTypeError(
            f'got {text!r:.40}, expected a round such as v2.0'
            f'{nearest(word, [*ROUNDS]) or ", from v0.5 to v4.0"}'
        )
    return name


def render_rounds(rulesets: Collection[str]) -> str:
    """Return the rounds of rulesets, such as 'v0.5, v1.0 to v4.0'."""
    parts = [
        [ROUND_OF[r] for r in part]
        for is_in, part in groupby(RULESETS, lambda r: r in rulesets)
        if is_in
    ]
    return ', '.join(part[0] if len(part) == 1 else f'{part[0]} to {part[-1]}' for part in parts)
