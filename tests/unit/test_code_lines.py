"""Lines of source that logs name, compared with submitted code."""

from helpers import write_files
from lines import mllog, write_lines

from mlperf_rn50.mllog.check.code_lines import named_places, source_files, strange_places

SOURCE = """\
import log

log.event(
    'epochs',
    3,
)
# log.event('old')
total = 3
log.end()
"""


def test_named_places_are_those_of_files_that_are_no_libraries(tmp_path):
    places = [
        {'file': '/opt/train.py', 'lineno': 3},
        {'file': '/opt/train.py', 'lineno': 3},
        {'file': '<string>', 'lineno': 3},
        {'file': 'N/A', 'lineno': 1},
        {'file': '/usr/lib/python3/site-packages/x.py', 'lineno': 3},
        {'file': '/opt/train.py', 'lineno': 'x'},
        {'file': '/opt/train.py'},
    ]
    log = write_lines(tmp_path / 'log', [mllog('seed', k, 1, **p) for k, p in enumerate(places)])
    assert named_places([log]) == {('/opt/train.py', 3)}


def test_lines_without_a_call_and_lines_of_absent_files_are_strange(tmp_path):
    write_files(tmp_path, {'a/train.py': SOURCE, 'main.cc': 'a();\n\nb();\n'})
    files = source_files(tmp_path)
    named = [('/x/train.py', line) for line in range(12)] + [('main.cc', 1), ('main.cc', 2)]
    strange = strange_places([*named, ('other.py', 1)], files)
    calls = {3, 4, 5, 6, 9}
    expected = [('/x/train.py', line) for line in range(12) if line not in calls]
    assert strange == [*expected, ('main.cc', 2), ('other.py', 1)]


def test_any_file_of_the_name_may_have_the_call_and_links_are_not_followed(tmp_path):
    write_files(tmp_path, {'code/old/train.py': '', 'code/new/train.py': SOURCE, 'x.py': 'f()'})
    (tmp_path / 'code/x.py').symlink_to(tmp_path / 'x.py')
    files = source_files(tmp_path / 'code')
    assert strange_places([('train.py', 9), ('x.py', 1)], files) == [('x.py', 1)]


def test_files_that_cannot_be_parsed_need_only_text_in_the_line(tmp_path):
    write_files(tmp_path, {'a.py': 'print "python 2"\n\n', 'b.py': '(' * 10_000})
    found = strange_places([('a.py', 1), ('a.py', 2), ('b.py', 1)], source_files(tmp_path))
    assert found == [('a.py', 2)]
