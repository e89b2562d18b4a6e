#!/usr/bin/env bash
# Builds a wheel of Horovod with MPI and Gloo, for the MXNet and Open MPI of a Python.
# Usage: launch/build_horovod.sh BIN VERSION FOLDER [NCCL]
#   BIN: folder of python, mpicxx, cmake and ninja; FOLDER: for the wheel; NCCL: its folder, for GPUs
set -euo pipefail
export PATH="$1:$PATH"
version=$2 folder=$3 nccl=${4:-}
# Variables of modules would change the build.
[ -n "${HOROVOD_CUDA_HOME:-}" ] || unset HOROVOD_CUDA_HOME
unset "${!HOROVOD_WITH@}" "${!HOROVOD_GPU@}" HOROVOD_CPU_OPERATIONS "${!OMPI_@}" "${!MPI_@}" "${!CCL_@}" CMAKE_PREFIX_PATH
export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
if [ -n "$nccl" ]; then
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_HOME="$nccl"
    ln -sf libnccl.so.2 "$nccl/lib/libnccl.so" # the wheel lacks this link, which the linker needs
fi
mkdir -p "$folder"
# Without debug information, which has 48 of 50 MB and makes the build slower.
cat >"$folder/cmake" <<'SH'
#!/bin/sh
[ "$1" = --build ] || set -- "$@" '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -DNDEBUG'
exec cmake "$@"
SH
chmod +x "$folder/cmake"
jobs=$(nproc)
export HOROVOD_CMAKE="$folder/cmake" MAKEFLAGS="${MAKEFLAGS:--j$((jobs < 8 ? jobs : 8))}"
# pip's cache may have a Horovod built with other options.
python -m pip --disable-pip-version-check wheel -v --no-cache-dir --no-build-isolation --no-deps -w "$folder" \
    "horovod==$version"
