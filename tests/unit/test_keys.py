"""The vocabulary that a report needs of mlperf-logging is that of mlperf-logging."""
from mlperf_logging.mllog import constants

from mlperf_rn50.mlperf import keys


def test_keys_are_the_official_ones():
    ours = {name: value for name, value in vars(keys).items() if name.isupper()}
    assert ours and ours == {name: getattr(constants, name, None) for name in ours}
