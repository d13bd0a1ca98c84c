#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzz a running h2o-serve by its own OpenAPI description: bash loadtest/recipes/schemathesis.sh [st options]
#
#   URL       http://127.0.0.1:8000   the server
#   API_KEY   none                    its --api-key
#   EXAMPLES  100                     requests per route at most
#   ST        st                      the command (schemathesis 4)
#
# Fails on every 5xx and on a server that is gone.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here"
# /v1/systemone answers 501 for models that cannot do it. A request without a length gets a long answer: wait for it.
SCHEMATHESIS_HOOKS=schemathesis_hooks exec "${ST:-st}" run "${URL:-http://127.0.0.1:8000}/openapi.json" \
    --header "Authorization: Bearer ${API_KEY:-none}" \
    --checks not_a_server_error --max-examples "${EXAMPLES:-100}" --phases fuzzing --continue-on-failure \
    --exclude-path /v1/systemone --request-timeout 120 "$@"
