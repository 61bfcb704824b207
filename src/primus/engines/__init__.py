"""The packages that frameworks drive: what is required, where it is installed, and the environments that hold it."""
