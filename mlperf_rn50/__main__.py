"""python -m mlperf_rn50"""

import sys

from mlperf_rn50.cli import main

sys.exit(main())
