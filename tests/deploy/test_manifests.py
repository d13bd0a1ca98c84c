# SPDX-License-Identifier: Apache-2.0
"""Dockerfile, compose file, Helm chart and examples: what can be checked without running them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import run

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "h2o-vllm"
KUBERNETES = "1.31"

VALUES = {
    "defaults": [],
    "cpu with everything": [
        "device=cpu",
        "image.tag=cpu",
        "model=",
        "serviceMonitor.enabled=true",
        "serviceMonitor.labels.release=prometheus",
        "hubToken.value=hf_secret",
        "apiKey.existingSecret=keys",
        "persistence.storageClass=fast",
        "nodeSelector.disk=ssd",
        "podAnnotations.team=llm",
        "extraEnv[0].name=VLLM_LOGGING_LEVEL,extraEnv[0].value=DEBUG",
        "imagePullSecrets[0].name=registry",
    ],
    "three replicas of two GPUs": [
        "gpus=2",
        "replicaCount=3",
        "persistence.enabled=false",
        "hubToken.existingSecret=hub",
        "extraArgs={--max-model-len=8192}",
    ],
    "autoscaled": [
        "autoscaling.enabled=true",
        "autoscaling.minReplicas=2",
        "autoscaling.kvTokens=100000",
        "persistence.accessMode=ReadWriteMany",
    ],
    "autoscaled by KEDA": [
        "autoscaling.enabled=true",
        "autoscaling.minReplicas=2",
        "autoscaling.kvTokens=100000",
        "autoscaling.prometheus=http://prometheus:9090",
        "persistence.accessMode=ReadWriteMany",
    ],
    "a shared volume": ["replicaCount=2", "persistence.accessMode=ReadWriteMany"],
    "a volume that exists": ["persistence.existingClaim=models"],
}

REFUSED = {
    "kvBudget=7": "kvBudget",
    "kvBudget=0": "kvBudget",
    "device=tpu": "device",
    "kvbudget=0.2": "kvbudget",
    "replicaCount=2": "ReadWriteMany",
    "persistence.size=lots": "size",
    "autoscaling.enabled=true": "ReadWriteMany",
    "persistence.enabled=false,autoscaling.enabled=true,autoscaling.minReplicas=5": "minReplicas",
    "drain.seconds=0": "seconds",
    "persistence.enabled=false,autoscaling.enabled=true,autoscaling.prometheus=prometheus": "prometheus",
    # A number where Kubernetes wants a string.
    "extraEnv[0].name=A,extraEnv[0].value=8": "extraEnv",
}


def run_tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A tool of the test extra, from beside this Python or from PATH."""
    beside = Path(sys.executable).with_name(name)
    tool = str(beside) if beside.exists() else shutil.which(name)
    if tool is None:
        pytest.skip(f"no {name}: it is in the extra 'test' where there is a build for this machine")
    return run(tool, *arguments)


def rendered(*values: str) -> subprocess.CompletedProcess[str]:
    options = [part for value in values for part in ("--set", value)]
    return run_tool("helm", "template", "release", CHART, "--namespace", "ns", *options)


def resources(*values: str) -> dict[str, Any]:
    """The rendered resources by kind; there is one of each."""
    done = rendered(*values)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    kinds = {one["kind"]: one for one in found}
    assert len(kinds) == len(found)
    return kinds


def container(*values: str) -> dict[str, Any]:
    found: dict[str, Any] = resources(*values)["Deployment"]["spec"]["template"]["spec"]
    return {**found["containers"][0], "volumes": found["volumes"]}


def dockerfile_targets() -> dict[str, list[tuple[str, str]]]:
    """Target -> its instructions, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    targets: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            current = targets.setdefault(rest.rpartition(" AS ")[2], [])
        elif word:
            current.append((word, " ".join(rest.split())))
    return targets


def arguments_in_examples() -> list[str]:
    """Every long option that a file of deploy gives to h2o-serve."""
    places: list[Any] = [
        instruction for target in dockerfile_targets().values() for instruction in target
    ]
    found = [json.loads(rest) for word, rest in places if word == "CMD"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    found += [compose[name]["command"] for name in ("cpu", "gpu")]
    found += [container(*values)["args"] for values in VALUES.values()]
    flags = {arg.partition("=")[0] for args in found for arg in args}
    return sorted(flag for flag in flags if flag.startswith("--"))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_runs_the_server_as_somebody_else_than_root(target: str) -> None:
    instructions = dockerfile_targets()[target]
    last = dict(instructions)
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", last["USER"])
    assert json.loads(last["ENTRYPOINT"]) == ["h2o-serve"]
    assert "/health" in last["HEALTHCHECK"]
    assert "H2O_HOST=0.0.0.0" in last["ENV"]


def test_image_is_of_the_vllm_that_is_locked() -> None:
    (image,) = re.findall(
        r"^ARG VLLM_IMAGE=\S+:v(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    (locked,) = re.findall(
        r"^vllm==(\S+)$", (DEPLOY / "locks" / "cuda.txt").read_text(), re.MULTILINE
    )
    assert image == locked


def test_every_option_in_an_example_exists() -> None:
    from h2o_vllm.server.cli import build_parser

    flags = arguments_in_examples()
    assert "--kv-budget" in flags
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert set(flags) <= known


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_accepts_what_the_chart_renders(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    options = [part for value in VALUES[name] for part in ("--set", value)]
    assert run_tool("helm", "lint", "--strict", CHART, *options).returncode == 0
    for kind, resource in resources(*VALUES[name]).items():
        # Of the Prometheus operator and of KEDA, whose schemas come with no package.
        if kind not in ("ServiceMonitor", "ScaledObject"):
            validate.validate(resource, KUBERNETES, strict=True)


@pytest.mark.parametrize("value", REFUSED)
def test_chart_refuses_a_bad_value_by_name(value: str) -> None:
    done = rendered(value)
    assert done.returncode != 0
    assert REFUSED[value] in done.stderr


def test_secrets_reach_the_server_by_reference_only() -> None:
    everything = VALUES["cpu with everything"]
    variables = {one["name"]: one for one in container(*everything)["env"]}
    token = variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert token == {"name": "release-hub-token", "key": "token"}
    assert resources(*everything)["Secret"]["stringData"] == {"token": "hf_secret"}
    assert variables["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "keys"
    assert "Secret" not in resources("hubToken.existingSecret=hub")


def test_a_pod_has_time_for_its_drain() -> None:
    values = ("drain.unannouncedSeconds=7", "drain.seconds=100")
    pod = resources(*values)["Deployment"]["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert server["args"][server["args"].index("--shutdown-timeout") + 1] == "100"
    assert pod["terminationGracePeriodSeconds"] > 7 + 100
