# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM as a subprocess: a job as JSON on stdin, tokens and logprobs as JSON on stdout."""

import json
import sys


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], **job["engine"])
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        SamplingParams(**job["params"]),
        use_tqdm=False,
    )
    results = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in step.items()}
                for step in output.outputs[0].logprobs or []
            ],
        }
        for output in outputs
    ]
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
