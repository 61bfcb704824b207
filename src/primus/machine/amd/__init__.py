"""AMD GPUs: the devices that the driver lists, and their health."""
