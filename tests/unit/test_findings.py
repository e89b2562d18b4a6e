"""Table of findings."""

import configparser
import re

from helpers import ROOT

from mlperf_rn50.mllog.findings import GRADES, make_finding


def test_table_has_the_findings_of_the_code_and_no_others():
    table = configparser.ConfigParser(interpolation=None)
    table.read(ROOT / 'mlperf_rn50/mllog/findings.ini')
    code = '\n'.join(path.read_text() for path in (ROOT / 'mlperf_rn50').rglob('*.py'))
    kinds = {kind for grade in GRADES for kind in table[grade]}
    assert [kind for kind in kinds if f"'{kind}'" not in code] == []
    assert set(re.findall(r"(?:flag|make_finding)\(\s*'(\w+)'", code)) <= kinds


def test_values_from_logs_are_not_formats():
    found = make_finding('values_differ', 7, 'seed', '{0}', '{1!r} | x', 3)
    assert found.text == "seed is '{0}', but '{1!r} | x' on line 3; the first is used"
    assert found.summary == 'seed has several values; the first is used'
