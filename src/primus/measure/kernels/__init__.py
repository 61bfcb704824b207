"""What a device computes: matrix products, attention, a layer."""
