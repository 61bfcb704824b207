"""Reads training batches from token files: packing, blending, order, resumption."""
