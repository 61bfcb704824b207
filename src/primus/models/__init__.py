"""What the shape of a model says: layers, parameters, FLOPs, whether it can be built, the memory it needs."""
