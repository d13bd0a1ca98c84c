# SPDX-License-Identifier: Apache-2.0
"""KV budgets under Ray Serve LLM: ``serve run deploy.ray.serve_llm:app`` in a Ray cluster with GPUs.

Ray Serve brings its own HTTP ingress and starts vLLM's engine inside of it. So the engine part of
h2o_vllm is there, evictions included, and the server part is not:

* a request names its budget inside ``vllm_xargs`` (``extra_body={"vllm_xargs": {"kv_budget":
  0.2}}``); at the top level it is ignored;
* a budget out of range ends the request with an error of the engine instead of a 400;
* there are no ``h2o:`` metrics and no ``/plugins/h2o/config``; the ``kv_cache`` report stays inside
  ``kv_transfer_params``, under ``h2o``.

For all of these put ``h2o-serve`` replicas behind a router instead; see deploy/README.md.
"""

from ray.serve.llm import LLMConfig, build_openai_app

import h2o_vllm

config = LLMConfig(
    model_loading_config={
        "model_id": "smollm2",
        "model_source": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    },
    # h2o_vllm has to be installed where the replicas run: in the image, or by name in a runtime_env.
    deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    # The scheduler, the worker and the budget that a request gets which names none. engine_args looks
    # for a GPU: run this where there is one, or write out what it returns there.
    engine_kwargs={**h2o_vllm.engine_args(kv_budget=0.2), "max_model_len": 8192},
)

app = build_openai_app({"llm_configs": [config]})
