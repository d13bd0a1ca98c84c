# SPDX-License-Identifier: Apache-2.0
"""From a real scheduler, over vLLM's wire, through vLLM's stat loggers, to a scrape."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from h2o_vllm.config.keys import METRICS_KEY
from h2o_vllm.metrics.stat_logger import install
from h2o_vllm.models import default_model_dir
from tests.engine.scheduling import Rig


@pytest.fixture(scope="module")
def rig() -> Rig:
    """400 prompt tokens at a fifth, twice: run to the end."""
    rig = Rig(str(default_model_dir()), num_blocks=64, metered=True)
    rig.add("a", range(400), {"kv_budget": 0.2}, max_tokens=40)
    rig.add("b", range(400), {"kv_budget_tokens": 100}, max_tokens=40)
    rig.add("c", range(40), max_tokens=4)
    rig.run()
    return rig


def scraped(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None, f"no sample {name} {labels}"
    return value


def vllms_loggers(rig: Rig) -> StatLoggerManager:
    """Those of a server: one that prints, which fails on stats it does not know, and Prometheus."""
    manager = StatLoggerManager(
        rig.config, custom_stat_loggers=[LoggingStatLogger], enable_default_loggers=False
    )
    assert len(manager.stat_loggers) == 2
    return manager


def over_the_wire(rig: Rig) -> list[EngineCoreOutputs]:
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    each = [EngineCoreOutputs(scheduler_stats=stats) for stats in rig.stats]
    return [decoder.decode(encoder.encode(outputs)) for outputs in each]


def test_vllms_own_logger_fails_on_stats_it_does_not_know(rig: Rig) -> None:
    """Why ours has to come first; once it no longer fails, ours may come anywhere."""
    outputs = next(o for o in over_the_wire(rig) if o.scheduler_stats.kv_connector_stats)
    manager = vllms_loggers(rig)
    with pytest.raises((AssertionError, AttributeError)):
        manager.record(outputs.scheduler_stats, None)


def test_counts_of_a_real_scheduler_reach_a_scrape(rig: Rig) -> None:
    manager = vllms_loggers(rig)
    client = SimpleNamespace(logger_manager=manager)
    rejected = install(client, rig.config)
    engine = {"model_name": str(rig.config.model_config.served_model_name), "engine": "0"}
    model = {"model_name": engine["model_name"]}
    for _ in ("first engine", "an engine made anew in this process"):
        before = scraped("h2o:evicted_tokens_total", **engine)
        for outputs in over_the_wire(rig):
            manager.record(outputs.scheduler_stats, None)
            assert not outputs.scheduler_stats.kv_connector_stats
        blocks = sum(len(eviction.holes) for eviction in rig.evictions)
        assert blocks > 0
        assert scraped("h2o:evicted_tokens_total", **engine) - before == 16 * blocks
        manager = vllms_loggers(rig)
        install(SimpleNamespace(logger_manager=manager), rig.config)
    assert scraped("h2o:freed_blocks_total", **engine) == 2 * blocks
    assert scraped("h2o:kv_tokens_full", **engine) == 0, "nothing runs any more"
    assert scraped("h2o:kv_tokens_held", **engine) == 0
    budgets = {
        le: scraped("h2o:request_kv_budget_bucket", le=le, **engine)
        for le in ("0.2", "0.25", "1.0")
    }
    # Twice each: 0.2; 100 of 439 tokens; and the default, everything.
    assert budgets == {"0.2": 2, "0.25": 4, "1.0": 6}
    assert scraped("h2o:budget_rejections_total", reason="value", **model) == 0
    rejected("value")
    assert scraped("h2o:budget_rejections_total", reason="value", **model) == 1
    assert b"vllm:num_requests_running{" in generate_latest()


def test_gauges_tell_what_runs(rig: Rig) -> None:
    sent = [
        stats.kv_connector_stats[METRICS_KEY] for stats in rig.stats if stats.kv_connector_stats
    ]
    assert sum(one["freed_blocks"] for one in sent) == sum(len(e.holes) for e in rig.evictions)
    assert all(0 <= one["kv_tokens_held"] <= one["kv_tokens_full"] for one in sent)


def test_without_a_listener_nothing_is_sent() -> None:
    rig = Rig(str(default_model_dir()), num_blocks=64, kv_min_tokens=16)
    rig.add("a", range(400), {"kv_budget": 0.2}, max_tokens=20)
    rig.run()
    assert rig.evictions
    assert all(stats.kv_connector_stats is None for stats in rig.stats)


def test_without_statistics_there_is_no_logger() -> None:
    count = install(SimpleNamespace(logger_manager=None), SimpleNamespace())
    count("value")
