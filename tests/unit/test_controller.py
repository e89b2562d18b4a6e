"""Ranks that meet in a way Horovod was built without are told so before they wait for one another."""
import pytest

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.comm import check_controller


@pytest.mark.parametrize('env, has_mpi, has_gloo, said', [
    ({'HOROVOD_CONTROLLER': 'gloo'}, True, False, 'built without Gloo; start the ranks through MPI'),
    ({'OMPI_COMM_WORLD_SIZE': '2'}, False, True, 'built without MPI; start them with launch/horovodrun.sh')])
def test_what_horovod_lacks_is_named(env, has_mpi, has_gloo, said):
    with pytest.raises(ConfigError, match=said):
        check_controller(env, has_mpi, has_gloo)
    check_controller(env, True, True)


def test_ranks_that_need_nothing_of_it_are_let_in():
    check_controller({}, False, False)
    check_controller({'HOROVOD_CONTROLLER': 'gloo'}, False, True)
