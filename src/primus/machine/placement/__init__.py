"""Where nodes stand on the network, and the order of ranks that keeps the traffic of a job below few switches."""
