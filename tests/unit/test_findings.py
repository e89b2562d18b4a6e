"""Table of findings."""

import re

from helpers import ROOT

from mlperf_rn50.mllog.findings import _TEXTS, GRADES, make_finding


def test_table_has_the_findings_of_the_code_and_no_others():
    code = '\n'.join(path.read_text() for path in (ROOT / 'mlperf_rn50').rglob('*.py'))
    kinds = [kind for grade in GRADES for kind in _TEXTS[grade]]
    assert len(kinds) == len(set(kinds)) and [k for k in kinds if f"'{k}'" not in code] == []
    assert set(re.findall(r"(?:flag|make_finding)\(\s*'(\w+)'", code)) <= set(kinds)


def test_values_from_logs_are_not_formats():
    found = make_finding('values_differ', 7, 'seed', '{0}', '{1!r} | x', 3)
    assert found.text == "seed is '{0}', but '{1!r} | x' on line 3; the first is used"
    assert found.summary == 'seed has several values; the first is used'
