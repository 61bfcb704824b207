"""The host: processors, memory, limits, software, container and scheduler."""
