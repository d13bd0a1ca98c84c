# SPDX-License-Identifier: Apache-2.0
"""The chart with prefill apart from decode: two Deployments, one folder, a router that knows both."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.deploy.test_manifests import VALUES, every_resource

SIDES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def pod(found: dict[tuple[str, str], Any], side: str) -> dict[str, Any]:
    spec: dict[str, Any] = found["Deployment", f"release-{side}"]["spec"]["template"]["spec"]
    return spec


def options(found: dict[tuple[str, str], Any], side: str) -> dict[str, str]:
    args = pod(found, side)["containers"][0]["args"]
    return {name: value for name, value in pairwise(args) if name[:2] == "--"}


@pytest.mark.parametrize(
    ("name", "claim"),
    [("prefill apart from decode", "release-prompts"), ("apart on GPUs", "shared")],
)
def test_both_sides_share_a_folder_and_differ_in_their_role_alone(name: str, claim: str) -> None:
    found = every_resource(*VALUES[name])
    by_side = {side: options(found, side) for side in SIDES}
    for side, role in SIDES.items():
        transfer = json.loads(by_side[side].pop("--kv-transfer-config"))
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("ExampleConnector", role)
        folder = transfer["kv_connector_extra_config"]
        mounted = {
            one["mountPath"]: one["name"]
            for one in pod(found, side)["containers"][0]["volumeMounts"]
        }
        volumes = {one["name"]: one for one in pod(found, side)["volumes"]}
        volume = volumes[mounted[folder["shared_storage_path"]]]
        assert volume["persistentVolumeClaim"]["claimName"] == claim
        # Below the volume's 50 GiB, so that a disk is never full.
        assert folder["max_folder_gib"] == 45
        assert pod(found, side)["securityContext"]["runAsUser"] == 10001
    assert by_side["prefill"] == by_side["decode"]
    made = found.get(("PersistentVolumeClaim", claim))
    assert (made is None) == (claim == "shared")
    if made is not None:
        assert made["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_default_budget_is_one_that_a_decode_server_takes() -> None:
    """The default policy collects attention: on CPUs the first side evicts, on GPUs the policy is another."""
    cpu, gpu = (
        every_resource(*VALUES[name]) for name in ("prefill apart from decode", "apart on GPUs")
    )
    assert options(cpu, "decode")["--kv-delay"] == "0"
    assert options(gpu, "decode")["--kv-policy"] == "later"


def test_the_router_asks_the_services_of_both_sides() -> None:
    found = every_resource(*VALUES["prefill apart from decode"])
    given = options(found, "router")
    replicas = {side: found["Deployment", f"release-{side}"]["spec"]["replicas"] for side in SIDES}
    assert replicas == {"prefill": 2, "decode": 1}
    for side in SIDES:
        assert given[f"--{side}"] == f"http://release-{side}:8000"
    for name in ("", *(f"-{side}" for side in SIDES)):
        service = found["Service", f"release{name}"]["spec"]
        deployment = found["Deployment", f"release{name or '-router'}"]["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        assert service["selector"] == deployment["selector"]["matchLabels"]
        assert service["selector"].items() <= labels.items()
        ports = {one["name"] for one in deployment["template"]["spec"]["containers"][0]["ports"]}
        assert {one["targetPort"] for one in service["ports"]} <= ports
    assert ("PodDisruptionBudget", "release-prefill") in found
    assert ("PodDisruptionBudget", "release-decode") not in found


def test_the_router_has_the_servers_key() -> None:
    """vLLM's router does not pass on what a client sends."""
    found = every_resource(*VALUES["prefill apart from decode"], "apiKey.existingSecret=keys")
    names = {"decode": "VLLM_API_KEY", "router": "OPENAI_API_KEY"}
    keys = {
        side: {one["name"]: one for one in pod(found, side)["containers"][0]["env"]}[name]
        for side, name in names.items()
    }
    assert keys["decode"]["valueFrom"] == keys["router"]["valueFrom"]
    assert keys["router"]["valueFrom"]["secretKeyRef"]["name"] == "keys"


def test_the_router_takes_its_options() -> None:
    router = pytest.importorskip(
        "vllm_router.launch_router", reason="vLLM's router is in the extra fleet"
    )
    found = every_resource(*VALUES["prefill apart from decode"])
    args = router.parse_router_args(pod(found, "router")["containers"][0]["args"])
    assert args.vllm_pd_disaggregation
    assert args.prefill_urls == [("http://release-prefill:8000", None)]
    assert args.decode_urls == ["http://release-decode:8000"]
    assert (args.host, args.port) == ("0.0.0.0", 8000)


def test_only_servers_are_scraped() -> None:
    values = (*VALUES["prefill apart from decode"], "serviceMonitor.enabled=true")
    found = every_resource(*values)
    (endpoint,) = found["ServiceMonitor", "release"]["spec"]["endpoints"]
    ports = {
        name: {one["name"] for one in service["spec"]["ports"]}
        for (kind, name), service in found.items()
        if kind == "Service"
    }
    assert {name for name, names in ports.items() if endpoint["port"] in names} == {
        "release-prefill",
        "release-decode",
    }
