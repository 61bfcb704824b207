"""Labels of Kubernetes nodes name the switches above them, whichever platform wrote the labels."""

from __future__ import annotations

import pytest

from primus.machine.placement.node_labels import locate_by_labels

COMMON = {"kubernetes.io/hostname": "n1", "node.kubernetes.io/instance-type": "p5", "empty": ""}


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({}, ()),
        ({"topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": "r-a"}, ("r", "r-a")),
        (
            {
                "topology.k8s.aws/network-node-layer-3": "nn-leaf",
                "topology.k8s.aws/network-node-layer-1": "nn-top",
                "topology.k8s.aws/network-node-layer-2": "nn-mid",
                "topology.kubernetes.io/zone": "us-a",
            },
            ("us-a", "nn-top", "nn-mid", "nn-leaf"),
        ),
        (
            {"cloud.google.com/gce-topology-subblock": "sub", "cloud.google.com/gce-topology-block": "block"},
            ("block", "sub"),
        ),
        ({"fabric.topograph.run/tier-0": "leaf", "fabric.topograph.run/tier-1": "spine"}, ("spine", "leaf")),
        ({"cloud.provider.com/topology-rack": "", "cloud.provider.com/topology-block": "b"}, ("b",)),
        ({"network.topology.nvidia.com/leaf": "l", "nvidia.com/gpu.clique": "7b.3"}, ("l", "7b.3")),
    ],
)
def test_levels_stand_from_the_outermost_to_the_innermost(labels: dict[str, str], place: tuple[str, ...]) -> None:
    assert locate_by_labels(COMMON | labels) == place


def test_levels_that_the_cluster_names_win_over_known_ones() -> None:
    labels = {"example.com/hall": "h1", "example.com/row": "r7", "topology.kubernetes.io/zone": "a"}
    topologies = [["example.com/absent"], ["example.com/hall", "example.com/row"]]
    assert locate_by_labels(labels, topologies) == ("h1", "r7")
    assert locate_by_labels({"topology.kubernetes.io/zone": "a"}, topologies) == ("a",)
