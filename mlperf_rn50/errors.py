"""The errors a person can do something about; anything else is a bug and keeps its traceback."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: run it again with --resume
EXIT_AT_ONCE = 130  # asked twice to stop, or a command that has nothing to finish: as shells say of Ctrl-C


class UserError(Exception):
    """A mistake in what was asked for: one line saying what, got, expected and fix."""

    exit_code = EXIT_USAGE
    where = ''  # the rank, host, step and phase it happened at, once the run has started


class ConfigError(UserError):
    """A key, value or combination of values that cannot be run."""


class DataError(UserError):
    """A data set that is missing, incomplete or damaged."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or made by another run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose content is not what was written; one before it may be whole."""


class RunFailed(UserError):
    """A run that started and cannot end well, such as one whose loss is no longer finite."""

    exit_code = EXIT_FAILED


class StorageError(UserError):
    """A disk that takes nothing more; what was written before is whole."""

    exit_code = EXIT_FAILED


class RankLost(UserError):
    """Another rank, its host or its network is gone."""

    exit_code = EXIT_FAILED
