# SPDX-License-Identifier: Apache-2.0
"""Requests that no sane client sends: a grammar for the budget fields, written as raw JSON text.

As text, because the worst of it has no Python object: ``1e999``, the same key twice, half a surrogate. One
seed gives the same requests everywhere, on a stand-in and on a real server.
"""

import json
import random
from dataclasses import dataclass

from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.server.routes import LIFTED, PREPARED

MEGABYTE = 1 << 20

NUMBERS = (
    "0", "1", "-1", "0.2", "0.5", "1.0", "-0.0", "0.05", "0.049999999999999996",
    "1.0000000000000002", "1e-400", "5e-324", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", "2147483647", "2147483648", "4294967296", "9223372036854775808", "1E+2", "0.1e1",
    "128", "200", "1" + "0" * 400, "-1" + "0" * 5000, "0." + "3" * 3000,
)  # fmt: skip

STRINGS = (
    '""', '"0.2"', '"h2o"', '"window"', '"random"', '"value+key"', '"key+value"',
    '"prompt"', '"system"', '"H2O"', '"lru"',
    '"null"', '"\\u0000"', '"\\ud800"',
    '"\\ud83d\\ude00"', '"日本語"', '"é́́́"', '"\u202e0.2"', '"../../etc/passwd"',
    "\"'; DROP TABLE kv; --\"", '"{{7*7}}"', '"${jndi:ldap://x}"',
    '"!!python/object/apply:os.system [id]"', '"cos\\nsystem\\n(S\'id\'\\ntR."',
    '"__import__(\'os\').system(\'id\')"',
)  # fmt: skip

OTHERS = (
    "null", "true", "false", "[]", "{}", "[0.2]", '["h2o"]', '{"kv_budget":0.2}',
    "[[[[[[[[0.2]]]]]]]]", "[null]", '{"":{"":{"":0}}}',
)  # fmt: skip

BROKEN = (
    "",
    "0x1",
    "+1",
    ".5",
    "1.",
    "tru",
    "undefined",
    "'h2o'",
    '"open',
    "[1,",
    "0.2 0.3",
    "--1",
    "1_0",
)

SOUND = (
    '"kv_budget":0.2', '"kv_budget_tokens":200', '"kv_recent":0.5', '"kv_policy":"window"',
    '"kv_heads":"shared"', '"kv_heads":"equal"', '"kv_protect":4',
    '"kv_protect":100', '"kv_protect":"prompt"', '"kv_protect":"system"', '"kv_protect":"task"',
    '"kv_protect":"ends"',
    '"kv_elastic":true', '"kv_elastic":false', '"kv_evict_from":300', '"kv_delay":16',
    '"kv_prefill_tokens":256', '"kv_trace":false',
)  # fmt: skip

KEYS = (
    *REQUEST_FIELDS, *REQUEST_FIELDS, *REQUEST_FIELDS, "kv_bugdet", "KV_BUDGET", "kv-budget", "kv_",
    "kv_budget ", "kv_transfer_params", "kv_\\u0062udget", "kv_budget\\u0000", "kv_cache",
    "ｋｖ_budget", "vllm_xargs", "__class__",
)  # fmt: skip

PATHS = (
    *["/v1/completions"] * 12, *["/v1/messages"] * 3, *sorted(LIFTED), *sorted(PREPARED),
    "/generative_scoring", "/inference/v1/generate", "/v1/audio/transcriptions", "/cohere/v2/chat",
    "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/completions?kv_budget=7",
    "/v1/%63ompletions", "/tokenize", "/plugins/h2o/config", "/plugins/h2o/config?kv_budget=0.2",
    "/plugins/h2o/config/../config",
)  # fmt: skip

METHODS = (*["POST"] * 30, "GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")

TYPES = (
    *["application/json"] * 20, "application/json; charset=utf-16", "text/plain",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
    "application/octet-stream", "",
)  # fmt: skip


@dataclass(frozen=True)
class Nonsense:
    """One request."""

    method: str
    path: str
    content_type: str
    content: bytes


def nonsense(chance: random.Random, model: str = "m") -> Nonsense:
    """The next request of a sequence that ``chance`` determines."""
    content = _body(chance, model).encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        content = _damaged(chance, content)
    return Nonsense(
        method=chance.choice(METHODS),
        path=chance.choice(PATHS),
        content_type=chance.choice(TYPES),
        content=content,
    )


def _body(chance: random.Random, model: str) -> str:
    if chance.random() < 0.03:
        return chance.choice(
            ("", "null", "[]", "0", '"kv_budget"', "{}", "{", "\ufeff{}", "[" * 200_000)
        )
    members = [f'"model":{json.dumps(model)}', '"max_tokens":2']
    members.append(
        chance.choice(
            (
                *['"prompt":"hi"'] * 3,
                '"prompt":[5,6,7]',
                '"messages":[{"role":"user","content":"hi"}]',
                '"messages":[{"role":"system","content":"be"},{"role":"user","content":"hi"}]',
                '"system":"be","messages":[{"role":"user","content":"hi"}]',
            )
        )
    )
    if chance.random() < 0.2:
        members.append('"stream":true')
    if chance.random() < 0.2:
        # /v1/responses takes its input from here, and builds the engine's request id from the other.
        identity = chance.choice(("9" * 5000, "0_x", "_", "-1_", "\u00b2_", "x" * 3000))
        members += ['"input":"hi"', '"max_output_tokens":2', f'"request_id":"{identity}"']
    members += [_member(chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    if chance.random() < 0.3:
        inner = ",".join(_member(chance) for _ in range(chance.choice((0, 1, 2))))
        members.append(f'"vllm_xargs":{chance.choice((f"{{{inner}}}",) * 8 + OTHERS)}')
    if chance.random() < 0.02:
        members.append(f'"user":"{"x" * MEGABYTE}"')
    chance.shuffle(members)
    return "{" + chance.choice((",", ",", ",", " , ", ",\n")).join(members) + "}"


def _member(chance: random.Random) -> str:
    if chance.random() < 0.2:
        # Else next to nothing would pass us by.
        return chance.choice(SOUND)
    return f'"{chance.choice(KEYS)}"{chance.choice((":", ":", ": ", " :"))}{_value(chance)}'


def _value(chance: random.Random) -> str:  # noqa: PLR0911 - a grammar's alternatives
    kind = chance.random()
    if kind < 0.45:
        return chance.choice(NUMBERS)
    if kind < 0.55:
        return repr(chance.uniform(-0.5, 1.5))
    if kind < 0.6:
        return str(chance.randrange(-(2**70), 2**70))
    if kind < 0.8:
        return chance.choice(STRINGS)
    if kind < 0.96:
        return chance.choice(OTHERS)
    if kind < 0.985:
        return chance.choice(BROKEN)
    depth = chance.choice((50, 900, 1100, 5000))
    return chance.choice(
        (
            "[" * depth + "]" * depth,
            '{"a":' * depth + "1" + "}" * depth,
            f'"{"k" * MEGABYTE}"',
            "9" * 5000,
        )
    )


def _damaged(chance: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\xff"
    place = chance.randrange(len(content))
    cut = content[:place]
    return chance.choice(
        (cut, cut + b"\xff" + content[place:], cut + b"\x00" + content[place + 1 :], content * 2)
    )
