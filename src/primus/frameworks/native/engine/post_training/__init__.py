"""What follows pretraining: generation of tokens."""
