"""The manifests in deploy/kubernetes: valid by Kubernetes' own schemas, at one with each other, and without privileges.

The schemas and a reader of YAML are in a virtualenv of their own, so that this needs no cluster and no network.
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from envs.curve import generate_pair
from orchestrator.cli import main
from orchestrator.discovery.following import DNS
from orchestrator.discovery.membership import JITTER
from tests.adapters.venvs import CHECKOUT, KUBERNETES

DIRECTORY = CHECKOUT / "deploy" / "kubernetes"
CONFIG = tomllib.loads((DIRECTORY / "config.toml").read_text(encoding="utf-8"))
DNS_CACHE_S = 30
"""For as long a cluster's resolver may give an old answer, as it comes."""
ENDS_WITHIN_S = 20
"""An env server after SIGTERM."""
READ = """
import json, sys, kubernetes_validate, yaml
found = []
for path in sys.argv[1:]:
    for document in yaml.safe_load_all(open(path)):
        # These two are no part of Kubernetes itself.
        if document["kind"] not in ("ServiceMonitor", "Kustomization"):
            kubernetes_validate.validate(document, "1.33", strict=True)
        found.append(document)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """All documents by kind and name, each of which has passed the schema of its kind."""
    if reason := KUBERNETES.missing():
        pytest.skip(reason)
    paths = sorted(map(str, DIRECTORY.glob("*.yaml")))
    done = subprocess.run(
        [KUBERNETES.python, "-c", READ, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    documents = json.loads(done.stdout)
    return {
        (document["kind"], document.get("metadata", {}).get("name", "")): document for document in documents
    }


def pods(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each workload's pods are."""
    return {
        name: document["spec"]["template"]["spec"]
        for (kind, name), document in manifests.items()
        if kind in ("StatefulSet", "Deployment", "Job")
    }


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the Secret fills."""
    pair = generate_pair()
    for name in ("ENV_SERVER_PUBLIC", "TRAINER_PUBLIC"):
        monkeypatch.setenv(name, pair.public)
    for name in ("ENV_CLIENT_SECRET", "TRAINER_LINK_SECRET"):
        monkeypatch.setenv(name, pair.secret)
    monkeypatch.setenv("HTTP_TOKEN", "a token")


@pytest.mark.usefixtures("keys")
def test_the_configuration_of_the_cluster_passes_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the pod would start it, with the variables of its Secret."""
    assert main(["check", str(DIRECTORY / "config.toml"), "--run_dir", str(tmp_path)]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.adapters
def test_every_manifest_is_named_and_every_name_is_there(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """`kubectl apply -k` takes all files; only the one for an operator that not everybody has is left to the user."""
    listed = set(manifests["Kustomization", ""]["resources"])
    there = {path.name for path in DIRECTORY.glob("*.yaml")} - {"kustomization.yaml"}
    assert there - listed == {"servicemonitor.yaml"}
    assert listed <= there
    [generated] = manifests["Kustomization", ""]["configMapGenerator"]
    volumes = pods(manifests)["orchestrator"]["volumes"]
    assert {"name": "config", "configMap": {"name": generated["name"]}} in volumes


@pytest.mark.adapters
def test_the_orchestrator_is_one_with_its_run_on_a_volume(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """Two would fight over the run directory, and without a volume a restart would begin anew."""
    spec = manifests["StatefulSet", "orchestrator"]["spec"]
    assert spec["replicas"] == 1
    [claim] = spec["volumeClaimTemplates"]
    [container] = spec["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert CONFIG["run_dir"].startswith(f"{mounts[claim['metadata']['name']]}/")
    assert container["args"] == ["run", f"{mounts['config']}/config.toml"]


@pytest.mark.adapters
def test_nobody_is_killed_for_waiting_or_before_it_has_drained(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """Liveness asks /healthz, which answers whatever the run waits for; the grace is longer than the drain and the rest."""
    pod = pods(manifests)["orchestrator"]
    [container] = pod["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert f"127.0.0.1:{CONFIG['http']['port']}/readyz" in container["readinessProbe"]["exec"]["command"][-1]
    assert pod["terminationGracePeriodSeconds"] >= CONFIG["dispatch"]["drain_s"] + 30


@pytest.mark.adapters
@pytest.mark.parametrize("name", ["env-reverse", "env-lookup"])
def test_an_env_server_that_leaves_finishes_what_it_has(
    manifests: dict[tuple[str, str], dict[str, Any]], name: str
) -> None:
    """It goes on serving until the orchestrator has long given it nothing new; the grace has room for its own end after that."""
    pod = pods(manifests)[name]
    [container] = pod["containers"]
    python, _, code = container["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python", "the image has no other program that sleeps for sure"
    [sleep_s] = map(int, re.findall(r"time\.sleep\((\d+)\)", code))
    unnoticed_s = DNS_CACHE_S + DNS.look_every_s * (1 + JITTER) + DNS.leave_after_s
    assert sleep_s >= 2 * unnoticed_s
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + ENDS_WITHIN_S


@pytest.mark.adapters
@pytest.mark.parametrize("name", ["engine", "trainer"])
def test_the_examples_have_no_more_privileges_than_their_images_need(
    manifests: dict[tuple[str, str], dict[str, Any]], name: str
) -> None:
    """No capability, the runtime's seccomp profile, no API token; and the trainer, whose image is one's own, is not root."""
    pod = pods(manifests)[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    rights = container["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    if name == "trainer":
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert rights["readOnlyRootFilesystem"] is True
        assert {"/checkpoints", "/tmp"} <= {
            mount["mountPath"] for mount in container["volumeMounts"]
        }  # the pod's own


@pytest.mark.adapters
def test_prometheus_finds_the_metrics(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    """The monitor selects the Service by its labels, and asks a port that it has, where the orchestrator serves metrics."""
    monitor = manifests["ServiceMonitor", "orchestrator"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    selected = [
        document
        for (kind, _), document in manifests.items()
        if kind == "Service" and wanted <= document["metadata"]["labels"].items()
    ]
    [service] = selected
    [endpoint] = monitor["endpoints"]
    ports = {entry["name"]: entry["port"] for entry in service["spec"]["ports"]}
    assert ports[endpoint["port"]] == CONFIG["http"]["port"]
    assert endpoint["path"] == "/metrics"
    labels = manifests["StatefulSet", "orchestrator"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.adapters
@pytest.mark.parametrize("name", ["orchestrator", "env-reverse", "env-lookup"])
def test_our_own_pods_have_no_privileges(manifests: dict[tuple[str, str], dict[str, Any]], name: str) -> None:
    """Not root, no capability, a root file system that nobody writes to, the runtime's seccomp profile, no API token."""
    pod = pods(manifests)[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}  # the pod's own


@pytest.mark.adapters
def test_the_parts_find_each_other(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Names, ports and environments are the same in the configuration, in the Services and in the pods behind them."""
    services = {name: document["spec"] for (kind, name), document in manifests.items() if kind == "Service"}
    for table in CONFIG["train"]["env"]:
        [address] = table["addresses"]
        name, port = address.removeprefix("dns+").removeprefix("tcp://").split(":")
        service = services[name.split(".")[0]]
        assert service["clusterIP"] == "None"
        assert [entry["port"] for entry in service["ports"]] == [int(port)]
        [container] = pods(manifests)[service["selector"]["app"]]["containers"]
        assert container["args"][2] == table["id"]
        assert f"tcp://0.0.0.0:{port}" in container["args"]
    trainer = {entry["name"]: entry["value"] for entry in environ(manifests, "trainer") if "value" in entry}
    assert trainer["ORCHESTRATOR_ADDRESS"].endswith(CONFIG["trainer"]["bind"].rpartition(":")[2])
    ports = {entry["name"]: entry["port"] for entry in services["orchestrator"]["ports"]}
    assert ports == {
        "trainer": int(CONFIG["trainer"]["bind"].rpartition(":")[2]),
        "http": CONFIG["http"]["port"],
    }
    for kind, name in manifests:
        if kind == "PodDisruptionBudget":
            selector = manifests[kind, name]["spec"]["selector"]["matchLabels"]
            assert selector == services[name]["selector"]


@pytest.mark.adapters
def test_every_variable_that_the_configuration_names_comes_from_the_secret(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """And the documented command makes a Secret with every key that any pod, or Prometheus, asks for."""
    given = {entry["name"] for entry in environ(manifests, "orchestrator")}
    text = (DIRECTORY / "config.toml").read_text(encoding="utf-8")
    named = {part.split('"')[0] for part in text.split('"env:')[1:]} | {CONFIG["http"]["token_env"]}
    assert given == named
    asked = {
        entry["valueFrom"]["secretKeyRef"]["key"]
        for name in pods(manifests)
        for entry in environ(manifests, name)
        if "valueFrom" in entry
    }
    [endpoint] = manifests["ServiceMonitor", "orchestrator"]["spec"]["endpoints"]
    asked.add(endpoint["authorization"]["credentials"]["key"])
    page = (CHECKOUT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert all(f"={key}" in page or f"{key}=" in page for key in asked), asked


def environ(manifests: dict[tuple[str, str], dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The variables of a workload's only container."""
    [container] = pods(manifests)[name]["containers"]
    found: list[dict[str, Any]] = container.get("env", [])
    return found
