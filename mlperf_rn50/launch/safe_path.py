"""Runs a module of the program as `python -m` does, but imports nothing from the folder it is started in.

That is `python -P -m`, which Python has from 3.11 on; NVIDIA's container has 3.10.
"""
import os
import runpy
import sys

if __name__ == '__main__':
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p != own]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
