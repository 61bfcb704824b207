"""From token files to training batches: packing, blending, order, resumption."""
