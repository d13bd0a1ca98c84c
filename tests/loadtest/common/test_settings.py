# SPDX-License-Identifier: Apache-2.0
"""Options: the command line before the environment before the default; ranges; descriptions; prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.common.settings import Settings, parse
from loadtest.common.texts import Prompts, Ruler, documentation, read_jsonl
from loadtest.http.generator import Generator
from loadtest.http.mock_server import MockSettings
from loadtest.http.options import LoadSettings


def mock(*argv: str) -> MockSettings:
    return parse(MockSettings, "mock", argv)


def test_command_line_comes_before_environment_before_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOCK_TTFT_MS", "7")
    monkeypatch.setenv("MOCK_ITL_MS", "8")
    got = mock("--itl-ms", "9")
    assert (got.ttft_ms, got.itl_ms, got.output_tokens) == (7.0, 9.0, 128)


@pytest.mark.parametrize("text", ["1", "true", "0", "no"])
def test_switch_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOADTEST_REPORT", text)
    assert parse(LoadSettings, "t", []).report is (text in ("1", "true"))


@pytest.mark.parametrize("argv", [("--error-rate", "2"), ("--ttft-ms", "-1"), ("--ttft-ms", "x")])
def test_value_out_of_range_is_refused_by_name(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        mock(*argv)
    message = capsys.readouterr().err
    assert f"error: {argv[0]} (MOCK_" in message
    assert f"got '{argv[1]}', wanted a number >= 0" in message


def test_bad_environment_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOCK_PORT", "http")
    with pytest.raises(SystemExit):
        mock()
    assert "MOCK_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [LoadSettings, MockSettings])
def test_every_option_is_described_and_names_its_variable(settings: type[Settings]) -> None:
    prefix = settings.model_config["env_prefix"]
    for name, field in settings.model_fields.items():
        text, _, variable = (field.description or "").partition(" [")
        assert len(text) > 10, name
        assert text.endswith("."), name
        assert variable == f"{prefix}{name.upper()}]"


def test_secrets_are_not_published() -> None:
    settings = LoadSettings(api_key="hunter2")
    assert "hunter2" not in json.dumps(settings.public())
    assert "hunter2" not in repr(settings)
    assert settings.public()["budgets"] == "none"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"budgets": "x"}, "--budgets"),
        ({"stages": "x"}, "--stages"),
        ({"slo": "x"}, "--slo"),
        ({"body": "[]"}, "--body"),
        ({"body": "{"}, "--body"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"report": True}, "--report"),
        ({"jsonl": __file__}, "--jsonl"),
    ],
)
def test_setting_that_cannot_be_used_is_refused_by_name(
    changes: dict[str, object], named: str
) -> None:
    settings = LoadSettings().model_copy(update=changes)
    with pytest.raises(ValueError, match=named):
        Generator(settings, "http://127.0.0.1:1")


def test_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="--host"):
        Generator(LoadSettings(), "localhost:8000")


def words(text: str) -> int:
    """Stands in for a tokenizer: as uneven over a text as one, since tables and code have long words."""
    return len(text.split())


def test_prompts_are_the_same_again_and_share_no_beginning() -> None:
    first, again = (Prompts([documentation()], 800, words, jitter=0.1) for _ in range(2))
    texts = [first[i] for i in range(200)]
    assert texts == [again[i] for i in range(200)]
    # Some begin with the same line of a table, none with the same ten words.
    assert len({text[:160] for text in texts}) == 200


def test_prompts_have_their_length_in_tokens_wherever_they_are_taken_from() -> None:
    prompts = Prompts([documentation()], 800, words, jitter=0.1)
    lengths = [words(prompts[i]) for i in range(300)]
    assert sum(lengths) / 300 == pytest.approx(800, rel=0.01)
    # 10 % of jitter, and 6 % where the text changes its kind inside of a piece.
    assert 660 < min(lengths) < 740
    assert 860 < max(lengths) < 940
    # The same number of characters would be quite different numbers of tokens.
    chars = [len(prompts[i]) for i in range(300)]
    assert max(chars) > 1.5 * min(chars)


def test_ruler_goes_both_ways() -> None:
    text = documentation()
    ruler = Ruler(text, words)
    assert ruler.tokens == pytest.approx(words(text), rel=0.01)
    for tokens in (0, 1, 777, 30_000, ruler.tokens):
        assert ruler.tokens_at(ruler.char_at(tokens)) == pytest.approx(tokens, abs=1)
    assert ruler.char_at(10 * ruler.tokens) == len(text)


def test_salt_and_lane_give_other_prompts() -> None:
    documents = [documentation()]
    kinds = (
        Prompts(documents, 100, words, salt=salt, lane=lane) for salt in (0, 1) for lane in (0, 1)
    )
    assert len({prompts[i] for prompts in kinds for i in range(50)}) == 4 * 50


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"article": "one two"}\n{"article": "three"}\n')
    texts = read_jsonl(path, "article")
    assert [Prompts(texts, 0, words)[i] for i in range(3)] == ["one two", "three", "one two"]
    assert Prompts(texts, 5, len)[0] == "one t"
    with pytest.raises(ValueError, match=r"p\.jsonl:1"):
        read_jsonl(path, "text")
