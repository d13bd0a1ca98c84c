#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Benchmark a running h2o-serve with guidellm, once per budget: bash loadtest/recipes/guidellm.sh [OUT]
#
#   URL        http://127.0.0.1:8000        the server
#   TOKENIZER  the embedded model           directory or name of the tokenizer that prompts are made with
#   BUDGETS    "1.0 0.2"                    kv_budget of each benchmark
#   STREAMS    8                            requests at once
#   REQUESTS   16                           requests of a benchmark
#   GUIDELLM   guidellm                     the command (guidellm 0.8 or later)
#
# extras.body are fields of the request body. PROMPT and OUTPUT are lengths in tokens.
set -euo pipefail
out="${1:-guidellm-results}"
tokenizer="${TOKENIZER:-$(python -m h2o_vllm.models)}"
mkdir -p "$out"
for budget in ${BUDGETS:-1.0 0.2}; do
    echo "=== kv_budget $budget"
    "${GUIDELLM:-guidellm}" run --disable-console-interactive \
        --backend "kind=openai_http,target=${URL:-http://127.0.0.1:8000},request_format=/v1/completions,extras.body.kv_budget=$budget" \
        --profile "kind=concurrent,streams=${STREAMS:-8}" \
        --constraint "kind=max_requests,count=${REQUESTS:-16}" \
        --tokenizer "kind=hf_auto,model=$tokenizer" \
        --data "kind=synthetic_text,prompt_tokens=${PROMPT:-1000},output_tokens=${OUTPUT:-128}" \
        --output "kind=json,path=$out/kv-$budget.json"
done
