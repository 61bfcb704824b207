"""The golden manifests against the official schemas: of Kubernetes' own kinds, and of JobSet and Kubeflow Trainer."""

from __future__ import annotations

import copy
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import GOLDEN

validate = pytest.importorskip("kubernetes_validate")
pytest.importorskip("kubeflow_trainer_api")
jsonschema = pytest.importorskip("jsonschema")
crds = importlib.import_module("fakes.crds")

FORMS = sorted((GOLDEN / "kubernetes").glob("*.yaml"))


def documents(form: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(form.read_text(encoding="utf-8")) if each]


def job_specs(document: Any) -> list[Any]:
    """The specs of Jobs inside a JobSet or a TrainingRuntime."""
    spec = document["spec"]["template"]["spec"] if document["kind"] == "TrainingRuntime" else document["spec"]
    return [each["template"]["spec"] for each in spec.get("replicatedJobs", ())]


@cache
def validator(kind: str) -> Any:
    return jsonschema.Draft202012Validator(crds.strict(crds.schema(kind)))


def check(document: Any) -> None:
    """Raise for a field that the schema of `document` does not have, or whose value it does not take."""
    if document["kind"] not in crds.KINDS:
        validate.validate(document, validate.latest_version(), strict=True)
        return
    validator(document["kind"]).validate(document)
    for spec in job_specs(document):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        validate.validate(job, validate.latest_version(), strict=True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_manifest_is_valid(form: Path) -> None:
    found = documents(form)
    assert {each["kind"] for each in found} >= {"ConfigMap"}
    assert len(found) in (2, 3)
    for document in found:
        check(document)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ConfigMap", ("dat",), {}),
        ("JobSet", ("spec", "coordinator", "jobNumber"), 0),
        ("JobSet", ("spec", "replicatedJobs", 0, "replikas"), 1),
        ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "completions"), "two"),
        ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "hostNetwrk"), True),
        ("TrainJob", ("spec", "trainer", "numberNodes"), 2),
        ("TrainJob", ("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "hostNetwork"), True),
        ("TrainJob", ("spec", "trainer", "numNodes"), "two"),
        ("TrainingRuntime", ("spec", "mlPolicy", "torch", "numProcPerNode"), "auto"),
    ],
)
def test_a_wrong_field_is_found(kind: str, path: tuple[Any, ...], value: Any) -> None:
    form = "trainjob-host-network" if kind == "TrainingRuntime" else "trainjob" if kind == "TrainJob" else "amd-2x8"
    document = copy.deepcopy(
        next(each for each in documents(GOLDEN / f"kubernetes/{form}.yaml") if each["kind"] == kind)
    )
    check(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, validate.ValidationError)):
        check(document)
