# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, and what admission makes of them."""

import json
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.protocol import RefusalError, admit
from h2o_vllm.server.routes import Rule

PATH = "/v1/completions"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def passed(config: H2OConfig, request: bytes, rule: Rule = Rule.LIFT) -> Any:
    admission = admit(request, PATH, rule, config)
    return json.loads(admission.body)


def refused(config: H2OConfig, request: bytes, rule: Rule = Rule.LIFT) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        admit(request, PATH, rule, config)
    return caught.value
