"""Whose rules a log can be held against; light, as the command line lists them."""

V05 = 'v0.5'
RULESETS = (V05, '0.6.0', '0.7.0', '1.0.0', '1.1.0', '2.0.0', '2.1.0', '3.0.0', '3.1.0', '4.0.0')
DIVISIONS = ('open', 'closed')
# The round that a submission is for, and the rules of the checkers for it.
ROUNDS = {'v0.5': V05, **{f'v{r[:3]}': r for r in RULESETS[1:]}}
