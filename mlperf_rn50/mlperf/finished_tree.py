"""A submission tree as it is to be handed in: what is wrong with it, and what its descriptions still leave open."""
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlperf_rn50.mlperf.check_tree import judge_tree
from mlperf_rn50.mlperf.describe_system import check_description
from mlperf_rn50.mlperf.package import CODE_FOLDER, Package, judge_runs
from mlperf_rn50.mlperf.rulesets import ROUNDS
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.set_rules import find_oddities
from mlperf_rn50.mlperf.submitted_code import missing_code


def check_finished(home: Path, round_name: str, sets: Mapping[str, Sequence[Run]]) -> Package:
    """A tree, looked at as a whole; the official tools are given what has passed all else.

    Args:
        sets: the runs of each system, by the name of its folder in results.

    Raises:
        UserError: a log cannot be read.
        NotInstalled: mlperf-logging is not there.
    """
    parts = [_check_system(home, round_name, system, runs) for system, runs in sets.items()]
    problems = [text for part in parts for text in part.refusals]
    problems += _check_code(home)
    findings = [finding for part in parts for finding in part.findings]
    scores: dict[str, float] = {}
    if not problems:
        verdict = judge_tree(home, ROUNDS[round_name])
        problems += verdict.problems
        scores = verdict.scores or {}
        findings += [*verdict.findings, *([('result_summarizer', verdict.crash)] if verdict.crash else []),
                     *(('result_summarizer', f'{name}: {minutes:.2f} min') for name, minutes in scores.items())]
    return Package(home, tuple(problems), tuple(text for part in parts for text in part.oddities), tuple(findings),
                   tuple(text for part in parts for text in part.notes),
                   next(iter(scores.values())) if len(scores) == 1 else None)


def _check_system(home: Path, round_name: str, system: str, runs: Sequence[Run]) -> Package:
    """The logs and the description of one system."""
    refusals, (checker, text) = judge_runs(runs, ROUNDS[round_name])
    flaws, gaps = check_description(home, system, {r.division for r in runs} - {None})
    return Package(home, (*(f'{system}: {refusal}' for refusal in refusals), *flaws),
                   tuple(f'{system}: {odd}' for odd in find_oddities(runs)), ((checker, f'{system}: {text}'),),
                   tuple(gaps))


def _check_code(home: Path) -> list[str]:
    """What the code that package wrote lacks; other code is not judged."""
    folder = f'{CODE_FOLDER}/code'
    missing = missing_code(home / folder) if (home / folder).is_dir() else []
    return [f'{folder} lacks {", ".join(missing)}, which its scripts call'] if missing else []
