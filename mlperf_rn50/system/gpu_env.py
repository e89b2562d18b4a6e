"""Environment variables for ranks on GPUs; values set by the user or by NVIDIA's container are
kept.

Each command sets the missing variables if its device is a GPU. For other programs, the launchers
set MLPERF_RN50_DEVICE, and launch/bind.sh then sets each rank's missing variables, inside its
container.
"""

from collections.abc import Mapping
from pathlib import Path

from mlperf_rn50.files import load_ini

DEVICE_VARIABLE = 'MLPERF_RN50_DEVICE'
# names of the variables set by the program or by launch/bind.sh
SET_VARIABLE = 'MLPERF_RN50_SET_FOR_GPU'
NVIDIA_VARIABLE = 'NVIDIA_MXNET_VERSION'  # set in NVIDIA's container only

_TABLE = load_ini(Path(__file__).with_name('gpu.ini'))
SETTINGS = dict(_TABLE['all'])


def settings_of(is_nvidias: bool) -> dict[str, str]:
    """Return all settings for NVIDIA's build of MXNet or for another one."""
    return {**SETTINGS, **(_TABLE['nvidia'] if is_nvidias else {})}


def missing_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment of a rank; none unless its device is a GPU."""
    if env.get(DEVICE_VARIABLE) != 'gpu':
        return {}
    settings = settings_of(is_nvidias=bool(env.get(NVIDIA_VARIABLE)))
    added = {name: value for name, value in settings.items() if name not in env}
    return {
        **added,
        SET_VARIABLE: ','.join([*filter(None, env.get(SET_VARIABLE, '').split(',')), *added]),
    }
