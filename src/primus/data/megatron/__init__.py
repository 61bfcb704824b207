"""The formats of the .bin/.idx token files of Megatron-LM, their fingerprint and their manifest."""
