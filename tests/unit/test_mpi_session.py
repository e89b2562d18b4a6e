"""mpi_session: settings of Open MPI and the reasons it prints."""

import pytest
from helpers import json_table, variables, write_files

from mlperf_rn50.system.mpi_session import blame_settings, mpi_settings, reason_of

LINE = '-' * 74
GENERIC = f'{LINE}\nIt looks like MPI_INIT failed; your process is\nlikely to abort.\n{LINE}\n'
MISSING = f'{LINE}\nThe component was not found.\n\nHost:      n1\nComponent: openib\n{LINE}\n'
NOT_FOUND = 'The component was not found. Host: n1 Component: openib'
NOISE = '[n1:14] PMIX ERROR: UNREACHABLE in file x\n'
LOST = 'no reason given'


def test_settings_of_the_environment_precede_those_of_files(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    write_files(
        tmp_path,
        {
            'home/.openmpi/mca-params.conf': '# own\n pml = ucx # fast\nbtl=^openib\n\nempty =',
            'site/etc/openmpi-mca-params.conf': 'btl = tcp\noob_tcp_if_include = ib0\n',
        },
    )
    env = variables('OMPI_MCA_pml=ob1 UCX_TLS=rc OMPI_COMM_WORLD_RANK=0 PATH=/bin')
    assert mpi_settings(env, tmp_path / 'site') == {
        'OMPI_MCA_pml': 'ob1',
        'OMPI_MCA_btl': '^openib',
        'OMPI_MCA_empty': '',
        'OMPI_MCA_oob_tcp_if_include': 'ib0',
        'UCX_TLS': 'rc',
    }
    (tmp_path / 'other.conf').write_text('pml = cm\n')
    env = {'OMPI_MCA_mca_base_param_files': f'{tmp_path}/none,{tmp_path}/other.conf'}
    assert mpi_settings(env, tmp_path / 'site') == {'OMPI_MCA_pml': 'cm'}


@pytest.mark.parametrize(
    'output, reason',
    [
        (MISSING + GENERIC, NOT_FOUND),
        (
            f'{GENERIC}[n1:15] [[2,0],0] ORTE_ERROR_LOG: Out of resource in file x\n{MISSING}',
            NOT_FOUND,
        ),
        (GENERIC, 'It looks like MPI_INIT failed; your process is likely to abort'),
        (f'[n1:15] PML ucx cannot be selected\n{NOISE}', 'PML ucx cannot be selected'),
        (
            '[n1][[15,1],0][/mca/btl.c:9:listen] [n1][[15,1],1][/mca/btl.c:9:listen] bind() failed',
            'bind() failed',
        ),
        (NOISE, LOST),
        ('', LOST),
    ],
)
def test_reason_is_the_first_specific_message(output, reason):
    assert reason_of(output) == reason


def test_settings_are_found_for_a_user_without_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv('HOME', raising=False)
    monkeypatch.setattr('pwd.getpwuid', {}.__getitem__)
    assert mpi_settings({'OMPI_MCA_pml': 'ob1'}, tmp_path) == {'OMPI_MCA_pml': 'ob1'}


@pytest.mark.parametrize(
    'faulty, reasons, blamed, reason',
    json_table("""
""     | []            | ""    | ""
"abc-" | ["no memory"] | ""    | "no memory"  # also without settings
"b"    | ["wrong b"]   | "b"   | "wrong b"
"b"    | ["no reason given", "no reason given", "wrong b"] | "b" | "wrong b"
"b"    | ["no reason given"] | "b" | "no reason given"
"ab"   | ["wrong"]     | "abc" | "wrong"
"""),
    ids='none unrelated one lost never several'.split(),
)
def test_setting_without_which_open_mpi_starts_is_to_blame(faulty, reasons, blamed, reason):
    """A start fails with any of the faulty settings, '-' for a fault of something else; its reasons
    are printed in turn, and the last one again and again."""
    left = list(reasons)

    def reason_with(names):
        if not {*names, '-'} & {*faulty}:
            return ''
        return left.pop(0) if len(names) == 3 and len(left) > 1 else left[-1]

    faults, found = blame_settings([*'abc'], reason_with)
    assert (''.join(faults), found) == (blamed, reason)
