# SPDX-License-Identifier: Apache-2.0
"""What became of every request: the client's records against the replicas' logs. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.http.records import Record

__all__ = ["Account", "account"]

RECEIVED = re.compile(r"Received request \w+-([0-9a-f]{32})")
ANSWERED = re.compile(r"Generated response \w+-([0-9a-f]{32})\S* \(streaming complete\)")
DETAIL = re.compile(r"https?://\S+|\d{2,}|\[Errno \d+\] ")


@dataclass(frozen=True)
class Account:
    """Of all requests of a load test.

    Attributes:
        requests: sent, and not cut off by the test's end.
        answered: to their end.
        refused: failed before the first token: nothing is lost if they are sent again.
        broken: failed behind it.
        noticed: failed although the replica that was hit had never got them; ``None``: no replica was.
        repeated: reached replicas more than once, because the router sent them again.
        twice: were answered to the end more than once, though the client saw one answer.
        slowest: seconds to the first token of those answered, at most.
        errors: how they failed, and how many.
    """

    requests: int
    answered: int
    refused: int
    broken: int
    noticed: int | None
    repeated: int
    twice: int
    slowest: float
    errors: dict[str, int]


def account(records: Sequence[Record], logs: Sequence[str], victim: int | None) -> Account:
    """Balance the books of a load test.

    Args:
        records: of the client. logs: of each replica, from the test's beginning.
        victim: the replica that was hit, if it was one.
    """
    ended = [record for record in records if not record.cut]
    failed = [record for record in ended if not record.whole]
    received = [Counter(RECEIVED.findall(log)) for log in logs]
    answered = Counter(found for log in logs for found in set(ANSWERED.findall(log)))
    sent = {record.id for record in ended}
    everywhere = sum(received, Counter[str]())
    strangers = (
        None if victim is None else sum(record.id not in received[victim] for record in failed)
    )
    return Account(
        requests=len(ended),
        answered=len(ended) - len(failed),
        refused=sum(record.ttft is None for record in failed),
        broken=sum(record.ttft is not None for record in failed),
        noticed=strangers,
        repeated=sum(times > 1 for name, times in everywhere.items() if name in sent),
        twice=sum(times > 1 for name, times in answered.items() if name in sent),
        slowest=max((record.ttft or 0.0 for record in ended if record.whole), default=0.0),
        errors=dict(Counter(DETAIL.sub("", record.error or "") for record in failed)),
    )
