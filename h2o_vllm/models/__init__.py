# SPDX-License-Identifier: Apache-2.0
"""The embedded default model: from a PyPI package to a safetensors directory, without a model hub.

Runs in the process that starts the server. A conversion runs in its own process, ``python -m
h2o_vllm.models``; only that process imports heavy packages.
"""

from h2o_vllm.models.default import DEFAULT_MODEL_NAME as DEFAULT_MODEL_NAME
from h2o_vllm.models.default import default_calibration as default_calibration
from h2o_vllm.models.default import default_model_dir as default_model_dir
from h2o_vllm.models.default import default_model_file as default_model_file
