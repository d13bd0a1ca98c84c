# SPDX-License-Identifier: Apache-2.0
"""vLLM in a process of its own, as users run it: a job as JSON on stdin, results as JSON on stdout.

``job["h2o"]`` is ``None`` for plain vLLM, else the options of :func:`h2o_vllm.plugin.engine_args`.
"""

import json
import sys

RESULT_MARK = "RESULT "


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    from h2o_vllm.plugin import engine_args
    from tests.published import PUBLISHED

    ours = {} if job["h2o"] is None else engine_args(**{**PUBLISHED, **job["h2o"]})
    llm = LLM(job["model"], **{**ours, **job["engine"]})
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        [SamplingParams(**job["params"], extra_args=asked) for asked in job["asked"]],
        use_tqdm=False,
    )
    results = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "report": (output.kv_transfer_params or {}).get("h2o", {}).get("0"),
            "logprobs": [
                {str(token): entry.logprob for token, entry in step.items()}
                for step in output.outputs[0].logprobs or []
            ],
        }
        for output in outputs
    ]
    print(f"\n{RESULT_MARK}{json.dumps(results)}", flush=True)


if __name__ == "__main__":
    main()
