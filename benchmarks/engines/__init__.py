"""One file for each training engine that train_speed.py compares: `make(setting) -> step(tokens, targets) -> loss`.

Every step is a whole one: forward, backward, clipping of the global norm to 1, AdamW (fused where the engine lets
one choose), gradients gone. What an engine does by default in its own trainer is kept: its own loss, its own
precision (autocast, bf16 parameters with fp32 masters), its own unit of compilation.
"""
