"""NVIDIA GPUs: the devices that the driver lists, NVML, and the devices' health."""
