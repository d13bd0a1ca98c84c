# SPDX-License-Identifier: Apache-2.0
"""Sessions (streaming input): they keep all their KV, and one whose first part never fits ends."""

from copy import deepcopy
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.request import Request

from tests.engine.scheduling import Rig

BLOCKS = 10
"""Of 16 tokens."""
LIMIT = 100
"""Steps."""


class Chatting(Rig):
    """A rig behind vLLM's own front end, whose clients send parts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.front = OutputProcessor(None, log_stats=False)
        self.said: dict[str, list[tuple[str | None, bool]]] = {}
        """The finish reason of each part that was answered, and whether its session is finished."""
        self.reasons: list[str] = []
        update = self.scheduler.update_from_output

        def updating(*args: Any) -> Any:
            outputs = update(*args)
            for of_client in outputs.values():
                for said in self.front.process_outputs(of_client.outputs).request_outputs:
                    one: Any = said.outputs[0]
                    if one.finish_reason is not None:
                        self.said[said.request_id].append((one.finish_reason, said.finished))
                    if one.finish_reason == "error":
                        self.reasons.append(one.stop_reason)
            return outputs

        self.scheduler.update_from_output = updating

    def send(self, name: str, tokens: int, *, resumable: bool = True) -> None:
        """A part of a session or, if it is not resumable, its end."""
        params = SamplingParams(
            max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        part = EngineCoreRequest(
            name, [1000 + i for i in range(tokens)], None, params, None, 0.0, None, None, None,
            resumable=resumable, external_req_id=name,
        )  # fmt: skip
        # The engine gets it from another process: both sides add parts to lists of their own.
        to_engine = deepcopy(part)
        self.front.add_request(part, None)
        self.tokens.setdefault(name, [])
        self.said.setdefault(name, [])
        self.scheduler.add_request(Request.from_engine_core_request(to_engine, self._hasher))

    def answered(self, name: str, parts: int) -> None:
        """Step until so many parts are answered."""
        for _ in range(LIMIT):
            if len(self.said[name]) == parts:
                return
            self.step()
        raise AssertionError(f"{name} waits: {self.said[name]}")


def test_a_first_part_that_never_fits_ends_its_session(model_dir: str) -> None:
    rig = Chatting(model_dir, BLOCKS + 1)
    rig.send("session", 200)
    rig.answered("session", 1)
    assert rig.said["session"] == [("error", False)]
    assert f"at most {BLOCKS * 16} tokens of KV" in rig.reasons[0]
    rig.run(LIMIT)
    assert not rig.scheduler.requests


def test_a_session_that_fits_goes_on(model_dir: str) -> None:
    rig = Chatting(model_dir, BLOCKS + 1)
    for part in range(1, 9):
        rig.send("session", 14)
        rig.answered("session", part)
    rig.send("session", 1, resumable=False)
    rig.run(LIMIT)
    assert rig.said["session"] == [("length", False)] * 8
