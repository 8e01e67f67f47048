# moe-infinity on a CPU:
#
#   docker build -t moe-infinity .
#   docker run --rm moe-infinity run demo -p "The old house stood"
#   docker run -p 8000:8000 -v moe-infinity:/cache -e MOE_INFINITY_API_KEY=secret moe-infinity
#
# PyPI's torch comes with CUDA, several gigabytes. `--build-arg TORCH_INDEX=URL` names an index of
# smaller wheels for a CPU: pytorch.org says which. For a GPU, Triton needs a C compiler:
#
#   docker build -t moe-infinity --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#     --build-arg PACKAGES="gcc python3-dev" .
#
# Any base with apt and Python 3.10 to 3.13 will do.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=""
# Versions are those of the base, which is pinned by its name.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/moe-infinity
ENV PATH=/opt/moe-infinity/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
# As in the Makefile: torch brings setuptools, pinned, and the package is built with it.
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0 setuptools wheel \
    --extra-index-url "${TORCH_INDEX}"
COPY pyproject.toml README.md LICENSE ./
COPY moe_infinity moe_infinity
COPY models models
RUN cp LICENSE models/ \
    && pip install --no-cache-dir -c constraints.txt --no-build-isolation ./models '.[serve]'

FROM ${BASE}
ARG PACKAGES=""
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home moe-infinity \
    && install -d -o moe-infinity /cache
COPY --from=build /opt/moe-infinity /opt/moe-infinity
ENV PATH=/opt/moe-infinity/bin:$PATH HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
USER 10001
WORKDIR /home/moe-infinity
# Downloaded models and compiled kernels.
VOLUME /cache
EXPOSE 8000
# Of `serve`; other commands end before it matters.
HEALTHCHECK --start-period=120s --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["moe-infinity"]
CMD ["serve", "demo", "--host", "0.0.0.0"]
