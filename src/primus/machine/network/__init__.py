"""Network interfaces, RDMA ports, and the choice of those that a launch uses."""
