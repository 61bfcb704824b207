"""Environment variables of the workers: the precedence of their sources, and checks of the values."""
