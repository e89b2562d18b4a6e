"""Run a module like `python -P -m`, without importing from the current folder; Python 3.10 lacks -P."""
import os
import runpy
import sys

if __name__ == '__main__':
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p != folder]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
