#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Evaluate a running h2o-serve with lm-eval, once per budget: bash loadtest/recipes/lm_eval.sh [OUT]
#
#   URL      http://127.0.0.1:8000          the server
#   MODEL    SmolLM2-135M-Instruct          its model
#   TOKENIZER  (none)                       folder of its tokenizer; tasks that score given answers need it
#   BUDGETS  "1.0 0.5 0.2"                  kv_budget of each evaluation
#   FIELDS   kv_policy=auto                 other fields of each request, joined by commas
#   TASKS    h2o_needles                    any tasks; h2o_* need no network
#   SHOTS    0                              examples in each context
#   PYTHON   python                         of an environment with lm-eval[api]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out="${1:-lm-eval-results}"
server="model=${MODEL:-SmolLM2-135M-Instruct},base_url=${URL:-http://127.0.0.1:8000}/v1/completions"
server+=",tokenizer_backend=${TOKENIZER:+huggingface,tokenizer=}${TOKENIZER:-none}"
for budget in ${BUDGETS:-1.0 0.5 0.2}; do
    echo "=== kv_budget $budget"
    "${PYTHON:-python}" "$here/h2o_lm_eval.py" run --model h2o \
        --model_args "$server,max_retries=1,kv_budget=$budget,${FIELDS:-kv_policy=auto}" \
        --include_path "$here" --tasks "${TASKS:-h2o_needles}" --num_fewshot "${SHOTS:-0}" \
        --output_path "$out/kv-$budget" --log_samples
done
