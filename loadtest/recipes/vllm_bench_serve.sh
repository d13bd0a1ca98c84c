#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Benchmark a running h2o-serve with vLLM's own client, once per budget: bash loadtest/recipes/vllm_bench_serve.sh [OUT]
#
#   URL        http://127.0.0.1:8000        the server
#   MODEL      SmolLM2-135M-Instruct        its model, as /v1/models names it
#   TOKENIZER  the embedded model           directory or name of the tokenizer that prompts are made with
#   BUDGETS    "1.0 0.2"                    kv_budget of each benchmark
#   STREAMS    8                            requests at once
#   REQUESTS   32                           requests of a benchmark
#   PROMPT     1000                         tokens of a prompt, drawn at random
#   OUTPUT     128                          tokens generated for each
#   SEED       0                            of the prompts; another one for each run on one server, or the
#                                           prefix cache has them
#
# --extra-body are fields of the request body. Each budget has prompts of its own (--seed), so that none finds
# those of another in the prefix cache. Budgets count on from SEED.
#
# Executed against h2o-serve with vLLM 0.32 on 2026-11-21: both budgets ran to the end.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out="${1:-vllm-bench-results}"
tokenizer="${TOKENIZER:-$(python -m h2o_vllm.models)}"
mkdir -p "$out"
seed="${SEED:-0}"
for budget in ${BUDGETS:-1.0 0.2}; do
    echo "=== kv_budget $budget"
    seed=$((seed + 1))
    python "$here/vllm_bench_serve.py" --base-url "${URL:-http://127.0.0.1:8000}" --backend openai \
        --model "${MODEL:-SmolLM2-135M-Instruct}" --tokenizer "$tokenizer" --seed "$seed" \
        --dataset-name random --random-input-len "${PROMPT:-1000}" --random-output-len "${OUTPUT:-128}" \
        --num-prompts "${REQUESTS:-32}" --max-concurrency "${STREAMS:-8}" --ignore-eos \
        --extra-body "{\"kv_budget\": $budget}" --percentile-metrics ttft,tpot,itl,e2el \
        --save-result --result-dir "$out" --result-filename "kv-$budget.json"
done
