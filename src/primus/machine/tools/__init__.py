"""Management tools of the GPU vendors: how they are called, and what is read from them."""
