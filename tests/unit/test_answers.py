"""The answers of the analysis on made-up and on published logs: those of tests/answers.py."""
import pytest
from answers import CASES, RAW, published_rows, render
from helpers import PUBLISHED


@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_a_made_up_tree(tmp_path, case):
    rows = case.rows(tmp_path)
    assert rows and all(r.is_right for r in rows), render(case.name, case.why, rows)


@pytest.mark.needs_published
def test_the_published_logs():
    answers = dict(published_rows(PUBLISHED))
    assert len(answers) == 1 + len(RAW)
    assert all(r.is_right for rows in answers.values() for r in rows), '\n'.join(
        render(name, '', rows) for name, rows in answers.items())


def test_cases_have_names_of_their_own():
    assert len({c.name for c in CASES}) == len(CASES)
