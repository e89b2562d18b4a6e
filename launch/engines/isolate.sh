# shellcheck shell=bash
# Removes variables of environment modules that replace packages or parts of the Python in .venv. Sourced on every host.
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE PYTHONSTARTUP PYTHONPLATLIBDIR PYTHONINSPECT PYTHONWARNINGS PYTHONOPTIMIZE
export PYTHONNOUSERSITE=1
