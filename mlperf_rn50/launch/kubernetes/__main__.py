"""Program behind launch/kubernetes.sh."""
import sys

from mlperf_rn50.launch.kubernetes.manifests import main

if __name__ == '__main__':
    sys.exit(main())
