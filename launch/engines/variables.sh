#!/usr/bin/env bash
# Prints the names of the environment variables that are forwarded to every rank.
compgen -e | grep -E '^(OMP_|KMP_|HOROVOD_|MXNET_|DNNL_|DALI_|NCCL_|UCX_|CUDA_|MLPERF_RN50_|GLIBC_TUNABLES$|NO_COLOR$|OMPI_MCA_btl$|NVIDIA_MXNET_VERSION$)' || true
