"""What deploy/kube and the Containerfile say: by the schemas of those who read it, no cluster."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from hotbranch import __version__
from hotbranch.load_settings import load_settings
from hotbranch.settings import UpSettings

ROOT = Path(__file__).parents[1]
KUBE = ROOT / "deploy/kube"
VALUES = sorted(KUBE.glob("values-*.yaml"))


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBE / "rayservice.yaml").read_text()))


def serve_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(documents()[0]["spec"]["serveConfigV2"])
    return config


def groups() -> dict[str, Any]:
    workers = documents()[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in workers}


def test_the_manifest_is_what_kuberay_and_kubernetes_read() -> None:
    schema = yaml.safe_load((ROOT / "tests/kube_schema.yaml").read_text())
    service, door = documents()
    for document in (service, door):
        jsonschema.validate(document, schema)
    assert (service["kind"], door["kind"]) == ("RayService", "Service")
    service["spec"]["rayClusterConfig"]["headGroupSpecs"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, schema)


def test_serve_reads_its_part() -> None:
    schema = ServeDeploySchema.model_validate(serve_config())
    (application,) = schema.applications
    assert application.import_path == "deploy.app:build"


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_values_are_settings(path: Path) -> None:
    settings = load_settings(UpSettings, {}, {}, path)
    assert settings.engine == "vllm"
    assert settings.replica_gpus * settings.most_replicas == 8, "all of eight GPUs"
    tensor = settings.engine_args.get("tensor_parallel_size", 1)
    assert settings.replica_gpus == tensor


def test_the_manifest_carries_the_values() -> None:
    (application,) = serve_config()["applications"]
    assert application["args"] == yaml.safe_load((KUBE / "values-8xh100.yaml").read_text())


def test_pods_and_settings_agree() -> None:
    settings = load_settings(UpSettings, {}, {}, KUBE / "values-8xh100.yaml")
    gpu, router = groups()["gpu"], groups()["router"]
    assert (gpu["minReplicas"], gpu["maxReplicas"]) == (settings.replicas, settings.max_replicas)
    (container,) = gpu["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert float(limits["nvidia.com/gpu"]) == settings.replica_gpus
    assert float(limits["cpu"]) >= settings.replica_cpus
    for group in (gpu, router):
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > settings.drain_s + 10, "what runs may finish"
    (container,) = router["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [settings.port]


def test_the_router_runs_where_the_service_looks() -> None:
    door = documents()[1]["spec"]
    router = groups()["router"]
    labels = router["template"]["metadata"]["labels"] | {"ray.io/group": router["groupName"]}
    assert door["selector"].items() <= labels.items()
    (deployment,) = serve_config()["applications"][0]["deployments"]
    wanted = deployment["ray_actor_options"]["resources"]
    offered = yaml.safe_load(yaml.safe_load(router["rayStartParams"]["resources"]))
    assert deployment["name"] == "Router"
    assert all(offered.get(name, 0) >= amount for name, amount in wanted.items())
    assert not any("resources" in groups()[name]["rayStartParams"] for name in ("gpu",))


@pytest.mark.timeout(120)
def test_serve_build_knows_the_deployments_by_these_names(tmp_path: Path) -> None:
    """The real `serve build`, which imports the application and needs no cluster."""
    app = tmp_path / "built.py"
    values = KUBE / "values-8xh100.yaml"
    app.write_text(
        "import yaml\nfrom deploy.app import build\n"
        f"app = build(yaml.safe_load(open({str(values)!r})))\n"
    )
    out = tmp_path / "serve.yaml"
    command = [sys.executable, "-m", "ray.serve.scripts", "build", "built:app"]
    command += ["--app-dir", str(tmp_path), "--output-path", str(out)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, timeout=100)
    (built,) = yaml.safe_load(out.read_text())["applications"]
    found = {deployment["name"]: deployment for deployment in built["deployments"]}
    assert set(found) == {"Replica", "Router"}
    assert found["Replica"]["ray_actor_options"]["num_gpus"] == 1
    scaling = found["Replica"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 8)


def test_the_image_takes_what_is_there() -> None:
    text = (ROOT / "deploy/Containerfile").read_text()
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    sources = [
        source for line in re.findall(r"^COPY (.+)$", text, re.M) for source in line.split()[:-1]
    ]
    assert {"hotbranch", "router", "replicas", "deploy", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, "else the build does not see it"
    assert f"hotbranch:{__version__}" in text
    (base,) = re.findall(r"^FROM (\S+)$", text, re.M)
    assert re.fullmatch(r"docker\.io/vllm/vllm-openai:v\d+\.\d+\.\d+", base), "a pinned release"
    assert re.search(r"^USER \d+$", text, re.M), "not root"


def test_ray_is_the_one_that_we_pin() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    version = documents()[0]["spec"]["rayClusterConfig"]["rayVersion"]
    assert version == pins["ray"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("ray[serve]") for each in extras["optional-dependencies"]["ray"])
