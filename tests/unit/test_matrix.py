"""The matrix of faults: up to date, and no cell empty."""
import matrix


def test_the_page_says_what_the_marks_say():
    assert matrix.PAGE.read_text() == matrix.render(matrix.collect(), matrix.load_times()), 'run python tests/matrix.py'


def test_no_cell_is_empty():
    assert not matrix.empty_cells(matrix.collect())


def test_marks_are_found_in_decorators_and_parameters(tmp_path):
    path = tmp_path / 'test_x.py'
    path.write_text('''
@pytest.mark.fault('kill', 'training', 'evaluation')
@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.fault('term', 'start-up'))])
def test_it(a):
    pass
''')
    assert sorted(matrix.marks_of(path)) == [('test_it', ['kill', 'training', 'evaluation']),
                                             ('test_it', ['term', 'start-up'])]
