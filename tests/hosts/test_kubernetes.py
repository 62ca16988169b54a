"""The manifest of docs/hosts.md, against the schemas of Kubeflow's client (the job) and of Kubernetes (its pods)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page import recipes

yaml = pytest.importorskip("yaml", reason="needs the extra `hosts`")
models = pytest.importorskip("kubeflow.training.models", reason="needs the extra `hosts`")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra `hosts`")

PLAIN = {"str": str, "int": int, "bool": bool}


def check(value: Any, kind: str, where: str) -> None:
    """Raises unless `value` is what Kubeflow's generated model of this kind has: known fields, of their types."""
    if match := re.fullmatch(r"dict\(str, (\w+)\)", kind):
        for key, each in value.items():
            check(each, match[1], f"{where}.{key}")
    elif kind in PLAIN:
        if type(value) is not PLAIN[kind]:
            raise ValueError(f"{where} is {value!r}, expected {kind}")
    elif kind == "V1PodTemplateSpec":
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **value}
        kubernetes_validate.validate(pod, "1.31", strict=True)
    elif hasattr(models, kind):
        model = getattr(models, kind)
        names = {said: name for name, said in model.attribute_map.items()}
        for key, each in value.items():
            if key not in names:
                raise ValueError(f"{where} has {key!r}, expected one of {', '.join(names)}")
            check(each, model.openapi_types[names[key]], f"{where}.{key}")


def manifest() -> Any:
    return yaml.safe_load(recipes()["Kubernetes"][0])


def test_the_manifest_fits_its_schemas() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check(job, "KubeflowOrgV1PyTorchJob", "job")
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "elasticPolicy", "maxReplica"), 4),
        (("spec", "elasticPolicy", "maxRestarts"), "10"),
        (("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "volume"), []),
    ],
)
def test_the_check_can_fail(path: tuple[str, ...], value: Any) -> None:
    job = manifest()
    at = job
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(Exception, match=path[-1]):
        check(job, "KubeflowOrgV1PyTorchJob", "job")
