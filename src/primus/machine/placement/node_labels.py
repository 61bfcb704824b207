"""Where a node stands, as the labels of a Kubernetes node say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primus.machine.placement.rank_order import Place

LABELS = (
    # Kubernetes, "Well-Known Labels, Annotations and Taints".
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    # Amazon EKS: network layers from the top of the tree to the instance, then the NVLink domain.
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "topology.k8s.aws/network-node-layer-4",
    "topology.k8s.aws/ultraserver-id",
    # Google Kubernetes Engine: block, sub-block (on A4X the NVLink domain), host.
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "cloud.google.com/gce-topology-host",
    # Oracle Kubernetes Engine, clusters with RDMA.
    "oci.oraclecloud.com/rdma.hpc_island_id",
    "oci.oraclecloud.com/rdma.network_block_id",
    "oci.oraclecloud.com/rdma.local_block_id",
    # Kueue, "Topology Aware Scheduling": the levels of its documentation.
    "cloud.provider.com/topology-block",
    "cloud.provider.com/topology-rack",
    # NVIDIA Topograph 1: tier 0 is the switch next to the node.
    "fabric.topograph.run/tier-3",
    "fabric.topograph.run/tier-2",
    "fabric.topograph.run/tier-1",
    "fabric.topograph.run/tier-0",
    "accelerator.topograph.run/domain",
    "accelerator.topograph.run/sub-domain",
    # NVIDIA Topograph 0.
    "network.topology.nvidia.com/core",
    "network.topology.nvidia.com/spine",
    "network.topology.nvidia.com/leaf",
    "network.topology.nvidia.com/accelerator",
    # NVIDIA GPU feature discovery: ClusterUUID.CliqueId of the NVLink domain.
    "nvidia.com/gpu.clique",
)
"""Labels that say where a node stands, from the outermost level to the innermost."""


def locate_by_labels(labels: Mapping[str, str], topologies: Iterable[Iterable[str]] = ()) -> Place:
    """The switches above a node with `labels`, outermost first; empty where no label says.

    Args:
        topologies: Levels that the cluster names itself, each from the outermost; the first that the node has labels of
            wins over LABELS.
    """
    for levels in (*topologies, LABELS):
        if found := tuple(labels[level] for level in levels if labels.get(level)):
            return found
    return ()
