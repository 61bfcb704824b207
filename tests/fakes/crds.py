"""Schemas of JobSet and Kubeflow Trainer, made of the models that the project publishes (kubeflow-trainer-api)."""

from __future__ import annotations

from typing import Any

KINDS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
"""Names of the models."""
PLACES = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}
KEPT = ("type", "enum", "required")
"""What of a schema counts besides its structure."""


def schema(kind: str) -> dict[str, Any]:
    """The structural schema of a `kind`: references inlined, as a CustomResourceDefinition wants it."""
    from kubeflow_trainer_api import models  # takes a second, in each process that collects the tests

    whole = getattr(models, KINDS[kind]).model_json_schema(by_alias=True)
    return _structural(whole, whole["$defs"])


def _structural(node: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name.endswith(("ResourceQuantity", "IntOrString")):  # wrappers that hold text or a number
            return {"x-kubernetes-int-or-string": True}
        return _structural(named[name], named)
    options = [each for each in node.get("anyOf", ()) if each != {"type": "null"}]
    if options:
        return _structural(options[0], named)
    found = {key: node[key] for key in KEPT if key in node}
    if "properties" in node:
        found["properties"] = {key: _structural(each, named) for key, each in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        found["additionalProperties"] = _structural(node["additionalProperties"], named)
    if "items" in node:
        found["items"] = _structural(node["items"], named)
    if found.get("type") == "object" and "properties" not in found and "additionalProperties" not in found:
        found["x-kubernetes-preserve-unknown-fields"] = True
    return found


def strict(node: dict[str, Any]) -> dict[str, Any]:
    """`node` as JSON Schema that takes no field but those it names."""
    if "x-kubernetes-int-or-string" in node:
        return {"type": ["integer", "string"]}
    found = {key: node[key] for key in KEPT if key in node}
    if "properties" in node:
        found["properties"] = {key: strict(each) for key, each in node["properties"].items()}
        found["additionalProperties"] = False
    if "additionalProperties" in node:
        found["additionalProperties"] = strict(node["additionalProperties"])
    if "items" in node:
        found["items"] = strict(node["items"])
    return found


def definition(kind: str) -> dict[str, Any]:
    """The CustomResourceDefinition of a `kind`."""
    group, version, plural = PLACES[kind]
    body = schema(kind)
    body["properties"]["metadata"] = {"type": "object"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a copy for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": body},
                    "subresources": {"status": {}},
                }
            ],
        },
    }
