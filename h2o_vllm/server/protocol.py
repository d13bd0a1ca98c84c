# SPDX-License-Identifier: Apache-2.0
"""The budget fields in the body of a request. API-server process; imports no vLLM.

A client writes the fields at the top level of the body or inside ``vllm_xargs``. vLLM passes only
``vllm_xargs`` to the engine and silently ignores unknown top-level fields. So checked fields are moved there.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from pydantic import TypeAdapter, ValidationError

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.errors import BudgetError, ConflictError, shown
from h2o_vllm.server.routes import LIFTED, MESSAGES, TRACED, Rule

XARGS = "vllm_xargs"

TRANSFER_PARAMS = "kv_transfer_params"

NOWHERE = ("extra_body", "metadata")
"""Objects of a body that vLLM ignores, in which clients put our fields by mistake."""

CLOSE = 0.8
"""Similarity (``difflib``) from which a name counts as a misspelled field."""

_FLAG = TypeAdapter(bool)

UNREADABLE = (
    "the request body cannot be read: nested too deeply, a number of too many digits, or not UTF-8"
)


class RefusalError(Exception):
    """The request is answered with a 400.

    Attributes:
        message: what is wrong, with the value got and the range accepted.
        param: the field at fault.
        reason: one of :data:`h2o_vllm.metrics.table.REJECTION_REASONS`.
    """

    def __init__(self, message: str, param: str | None, reason: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason


@dataclass(frozen=True)
class Admission:
    """A request that may pass.

    Attributes:
        body: for vLLM; the client's own bytes unless a field was moved.
        reported: whether its response carries a ``kv_cache`` object.
        request: the parsed body, if it is a JSON object.
        asked: its budget fields.
        budget: resolved with the server's defaults, before prompts are known; ``None`` if the route takes no
            fields.
    """

    body: bytes
    reported: bool
    request: Mapping[str, Any] | None = None
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    budget: RequestBudget | None = None

    @property
    def names_protect(self) -> bool:
        """Whether the body names ``kv_protect``."""
        return self.asked.get("kv_protect") is not None


def admit(body: bytes, path: str, rule: Rule, config: H2OConfig, query: bytes = b"") -> Admission:
    """Check the budget fields of a body and move them to where vLLM reads them.

    A body that is no JSON object passes unchanged, and vLLM answers it. A body that Python's parser cannot
    read is refused: it would be a 500 of ``/invocations`` (0.32).

    Args:
        query: the query string of the URL, where fields have no effect.

    Raises:
        RefusalError: a field is out of range, unknown, unsupported or misplaced, or contradicts another.
    """
    try:
        request = _parse(body)
    except (ValueError, RecursionError):
        if rule is not Rule.REFUSE:
            raise RefusalError(UNREADABLE, None, "value") from None
        request = None
    if rule is Rule.REFUSE:
        _refuse_fields(body, request, path)
        return Admission(body, reported=False)
    _refuse_misplaced(request or {}, query)
    answers = rule is Rule.LIFT
    if request is None:
        return Admission(body, reported=answers)
    asked, changed, budget = _lift(request, config)
    beams = _is_true(request.get("use_beam_search"))
    if beams and asked:
        first = next(iter(asked))
        raise RefusalError(f"{first} cannot be combined with use_beam_search", first, "unsupported")
    if budget.trace and answers:
        _refuse_trace(path, request.get("prompt"))
    # A beam search is hundreds of one-token requests to the engine: no report of one response.
    passed = _serialise(request) if changed else body
    return Admission(passed, answers and not beams, request, asked, budget)


def error_body(refusal: RefusalError, path: str = "") -> bytes:
    """``refusal`` in the shape of vLLM's (and OpenAI's) error responses, or in Anthropic's."""
    error = {
        "message": refusal.message,
        "type": "BadRequestError",
        "param": refusal.param,
        "code": 400,
    }
    kind = {"type": "error"} if path == MESSAGES else {}
    return json.dumps({**kind, "error": error}).encode()


def _is_true(value: Any) -> bool:
    """Whether pydantic, and so vLLM, reads ``value`` as true. vLLM refuses what is no flag."""
    try:
        return _FLAG.validate_python(value)
    except ValidationError:
        return False


def _parse(body: bytes) -> dict[str, Any] | None:
    """The JSON object in ``body``, or ``None`` if it is none.

    Raises:
        ValueError: it may be JSON, but has a number of thousands of digits, or is not UTF-8.
        RecursionError: it is nested too deeply.
    """
    try:
        request = json.loads(body)
    except json.JSONDecodeError:
        return None
    return request if isinstance(request, dict) else None


def _serialise(request: dict[str, Any]) -> bytes:
    try:
        return json.dumps(request, separators=(",", ":")).encode()
    except RecursionError:
        raise RefusalError("the request body is nested too deeply", None, "value") from None


def _lift(request: dict[str, Any], config: H2OConfig) -> tuple[dict[str, Any], bool, RequestBudget]:
    """Move the fields of ``request``, in place, into its ``vllm_xargs``.

    Returns:
        The fields, whether ``request`` has changed, and its budget.
    """
    given = request.get(XARGS)
    inner: dict[str, Any] = given if isinstance(given, dict) else {}
    _refuse_transfer_params((request, inner))
    _refuse_misspelled(request)
    _refuse_misspelled(inner)
    asked: dict[str, Any] = {}
    changed = False
    for field in REQUEST_FIELDS:
        places = [place for place in (request, inner) if place.get(field) is not None]
        if len(places) > 1:
            raise RefusalError(
                f"{field} must be given once: at the top level or inside {XARGS}, not in both",
                field,
                "conflict",
            )
        if places:
            asked[field] = places[0][field]
        if field in request:
            del request[field]
            changed = True
        elif field in inner and inner[field] is None:
            # null means "not given" to us; vLLM would refuse it inside vllm_xargs.
            changed = True
    budget = _resolved(asked, config)
    # Anything but an object in the place of vllm_xargs is left there for vLLM to refuse.
    if changed and (given is None or isinstance(given, dict)):
        merged = {k: v for k, v in inner.items() if k not in REQUEST_FIELDS} | asked
        request[XARGS] = merged or None
    return asked, changed, budget


def _resolved(asked: Mapping[str, Any], config: H2OConfig) -> RequestBudget:
    try:
        return resolve(config, asked)
    except BudgetError as error:
        reason = "conflict" if isinstance(error, ConflictError) else "value"
        raise RefusalError(str(error), error.parameter, reason) from None


def _shown(key: str) -> str:
    """``key``, cut to 40 characters for messages."""
    return key if len(key) <= 40 else f"{key[:40]}..."


def _meant(key: str) -> str | None:
    """The budget field that ``key`` is or misspells; ``None``: not ours."""
    name = key[:80].lower().replace("-", "_")
    if name in REQUEST_FIELDS or not name.startswith("kv"):
        return name if name in REQUEST_FIELDS else None
    begun = [field for field in REQUEST_FIELDS if field.startswith(f"{name}_")]
    return next(iter(begun or difflib.get_close_matches(name, REQUEST_FIELDS, 1, CLOSE)), None)


def _refuse_misspelled(place: Mapping[str, Any]) -> None:
    for key in place:
        meant = _meant(key)
        if meant is not None and meant != key:
            message = f"{_shown(key)!r} is not a known request field; did you mean {meant}?"
            raise RefusalError(message, _shown(key), "unknown_field")


def _misplaced(request: Mapping[str, Any], query: bytes = b"") -> Iterator[tuple[str, str]]:
    """Budget fields in places where nothing reads them, each with its place."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    yield from ((key, "the query string") for key, _ in pairs if key in REQUEST_FIELDS)
    for where in NOWHERE:
        place = request.get(where)
        for key, value in place.items() if isinstance(place, dict) else ():
            if key in REQUEST_FIELDS and value is not None:
                yield key, where


def _refuse_misplaced(request: Mapping[str, Any], query: bytes) -> None:
    for field, where in _misplaced(request, query):
        raise RefusalError(
            f"{field} has no effect inside of {where}: it belongs at the top level of the body or "
            f"inside {XARGS} (an OpenAI client's argument extra_body puts it at the top level)",
            field,
            "unsupported",
        )


def _refuse_trace(path: str, prompt: Any) -> None:
    """Refuse ``kv_trace`` of several sequences, or on a route without the token ids that it is laid over."""
    if path not in TRACED:
        message = f"kv_trace is not supported by {path}; it is by {', '.join(TRACED)}"
        raise RefusalError(message, "kv_trace", "unsupported")
    # One list of numbers is one prompt.
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        message = "kv_trace must be left out of requests with several prompts"
        raise RefusalError(message, "kv_trace", "unsupported")


def _refuse_fields(body: bytes, request: dict[str, Any] | None, path: str) -> None:
    """Refuse any budget field that this route could pass to the engine."""
    _refuse_transfer_params(_places_of(request or {}))
    for field in _fields_of(body, request):
        raise RefusalError(
            f"{_shown(field)} is not supported by {path}; it is by {', '.join(sorted(LIFTED))}",
            _shown(field),
            "unsupported",
        )


def _places_of(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of a body that some route passes to the engine."""
    sampling = request.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    places = (request, request.get(XARGS), sampling, extra)
    return [place for place in places if isinstance(place, dict)]


def _refuse_transfer_params(places: Iterable[Mapping[str, Any]]) -> None:
    """Refuse ``kv_transfer_params`` that are no object, which are a 500 in vLLM 0.32."""
    for place in places:
        value = place.get(TRANSFER_PARAMS)
        if value is not None and not isinstance(value, dict):
            raise RefusalError(
                f"{TRANSFER_PARAMS} must be an object, got {shown(value)}",
                TRANSFER_PARAMS,
                "value",
            )


def _fields_of(body: bytes, request: dict[str, Any] | None) -> Iterator[str]:
    if request is None:
        # A form (audio upload): its text parts hold the names as they are.
        yield from (field for field in REQUEST_FIELDS if field.encode() in body)
        return
    for place in _places_of(request):
        yield from (key for key in place if _meant(key) is not None)
    yield from (field for field, _ in _misplaced(request))
