# SPDX-License-Identifier: Apache-2.0
"""What is written beside a measured number."""

import pytest

from loadtest.common.machine import shown_command


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--url", "http://10.0.0.1:8000", "--budgets", "0.2"], "--url URL --budgets 0.2"),
        (["--url=http://10.0.0.1:8000"], "--url=URL"),
        (["--vllm-url", "host:8000"], "--vllm-url URL"),
        (["--api-key=secret"], "--api-key=KEY"),
        (["--api-key", "secret", "tail"], "--api-key KEY tail"),
        (["--host", "https://user:pass@host/v1"], "--host URL"),
        (["--report", "/a/b.jsonl", "/a/c.jsonl"], "--report b.jsonl c.jsonl"),
        (["--out", "~/results", "--log", "../x/y"], "--out results --log y"),
        (["--server-args", "--dtype x --model /m/tiny"], "--server-args '--dtype x --model tiny'"),
        (["--model", "owner/name", "--budgets", "0.2/h2o,0.2/window"],
         "--model owner/name --budgets 0.2/h2o,0.2/window"),
    ],
)  # fmt: skip
def test_a_command_shows_no_folder_no_server_and_no_key(words: list[str], shown: str) -> None:
    assert shown_command("h2o-serve", words) == f"h2o-serve {shown}"
