"""MLPerf time-to-accuracy runner for ResNet-50 v1.5 on MXNet Gluon."""

__version__ = '0.6.0'
