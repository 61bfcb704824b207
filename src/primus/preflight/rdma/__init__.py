"""RDMA bandwidth between the nodes, measured by perftest."""
