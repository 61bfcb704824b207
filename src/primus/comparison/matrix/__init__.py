"""The cells of a matrix, their commands and their runs."""
