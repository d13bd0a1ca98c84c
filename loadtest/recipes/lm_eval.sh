#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Score a running h2o-serve with lm-eval, once per budget: bash loadtest/recipes/lm_eval.sh [OUT]
#
#   URL      http://127.0.0.1:8000          the server
#   MODEL    SmolLM2-135M-Instruct          its model
#   BUDGETS  "1.0 0.5 0.2"                  kv_budget of each evaluation
#   TASKS    h2o_needles                    any generative task; this one needs no network
#   LM_EVAL  lm_eval                        the command, of an environment with lm-eval[api]
#
# gen_kwargs become fields of the request body, which is all that a budget needs. Only generative tasks
# (output_type generate_until): scoring given answers reads logprobs of a prompt, during which nothing is evicted.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out="${1:-lm-eval-results}"
for budget in ${BUDGETS:-1.0 0.5 0.2}; do
    echo "=== kv_budget $budget"
    "${LM_EVAL:-lm_eval}" run --model local-completions \
        --model_args "model=${MODEL:-SmolLM2-135M-Instruct},base_url=${URL:-http://127.0.0.1:8000}/v1/completions,tokenizer_backend=none,num_concurrent=8,max_retries=1" \
        --include_path "$here" --tasks "${TASKS:-h2o_needles}" \
        --gen_kwargs "kv_budget=$budget" \
        --output_path "$out/kv-$budget" --log_samples
done
