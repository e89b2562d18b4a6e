# Image with the program and all libraries; the NVIDIA driver comes from the host.
#   export DOCKER_BUILDKIT=1
#   docker build -t mlperf_rn50:cpu .
#   docker build -t mlperf_rn50:ngc --build-arg VARIANT=ngc --build-arg BASE=nvcr.io/nvidia/mxnet:24.06-py3 .
#   docker build -t mlperf_rn50:cu117 --build-arg VARIANT=cu117 .        (or cu112)
#   mkdir -p data
#   docker run --rm --user "$(id -u):0" -v "$PWD/data:/data" mlperf_rn50:cpu prepare digits --out /data/digits
# BASE is any Debian 12 with its default package sources, such as python:3.11-slim-bookworm. For ngc it is NVIDIA's MXNet
# container, whose MXNet, Horovod, DALI, NCCL and Open MPI are used; name@sha256:... pins it.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG VARIANT=cpu
ENV DEBIAN_FRONTEND=noninteractive
RUN [ "$VARIANT" = ngc ] || { \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ make \
        && rm -rf /var/lib/apt/lists/*; }
# nvcc builds Horovod for GPUs; the check of libraries needs libcuda1. NCCL is a PyPI wheel.
RUN [ "$VARIANT" = cpu ] || [ "$VARIANT" = ngc ] || { \
        find /etc/apt -name '*.list' -o -name '*.sources' | xargs sed -i -E 's/^((deb|Components:) .*main)$/\1 contrib non-free/' \
        && apt-get update \
        && apt-get install -y --no-install-recommends nvidia-cuda-toolkit libcuda1 \
        && rm -rf /var/lib/apt/lists/*; }
WORKDIR /opt/mlperf_rn50
# Packages first, so that changes of the program do not reinstall them. Downloads and the Horovod build are cached outside
# the image.
COPY setup.cfg pyproject.toml LICENSE ./
COPY launch/*setup* launch/set_rpaths.py launch/build_horovod.sh launch/*.lock launch/
COPY launch/engines/program.sh launch/engines/
COPY mlperf_rn50/__init__.py mlperf_rn50/
RUN --mount=type=cache,target=/root/.cache \
    touch README.md && MLPERF_RN50_VARIANT="$VARIANT" MLPERF_RN50_EXTRAS=demo,export launch/setup.sh \
    && { [ "$VARIANT" = ngc ] || .venv/bin/pip uninstall -q -y cmake ninja uv; }
COPY README.md ./
COPY launch launch
COPY mlperf_rn50 mlperf_rn50
# Also for other users if the checkout has a strict umask.
RUN chmod -R a+rX launch mlperf_rn50 setup.cfg pyproject.toml LICENSE README.md
# Check without a GPU that all libraries resolve and that MXNet, Horovod and DALI import.
RUN MLPERF_RN50_VARIANT="$VARIANT" launch/setup.sh --check && rm -rf mlperf_rn50/__pycache__

FROM ${BASE}
ARG VARIANT=cpu
# Open MPI and horovodrun use ssh, and workers of MPIJobs run sshd; MXNet needs libgomp and libquadmath. Clusters run the
# image as any user of group 0, which launch/user.sh adds to a file for libnss-extrausers.
RUN apt-get update && apt-get install -y --no-install-recommends python3 libgomp1 libquadmath0 \
        openssh-client openssh-server libnss-extrausers \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 1000 rn50 \
    && chgrp -R 0 /home/rn50 && chmod -R g=u /home/rn50 \
    && sed -i 's/^\(passwd\|group\):.*/& extrausers/' /etc/nsswitch.conf \
    && mkdir -p /var/lib/extrausers && chmod 1777 /var/lib/extrausers \
    && ln -s /opt/mlperf_rn50/launch/kubernetes/ssh_config /etc/ssh/ssh_config.d/mlperf_rn50.conf
COPY --from=build /opt/mlperf_rn50 /opt/mlperf_rn50
RUN MLPERF_RN50_VARIANT="$VARIANT" /opt/mlperf_rn50/launch/setup.sh --check
LABEL mlperf_rn50.variant=${VARIANT}
ARG COMMIT=
ENV MLPERF_RN50_COMMIT=${COMMIT} PATH=/opt/mlperf_rn50/.venv/bin:$PATH HOME=/home/rn50 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
# Kubernetes cannot check whether a named user is root, so the user is given as a number.
USER 1000
WORKDIR /home/rn50
ENTRYPOINT ["mlperf-rn50"]
