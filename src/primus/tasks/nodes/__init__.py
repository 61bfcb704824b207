"""List, add, check and clear unfit nodes, which jobs avoid."""
