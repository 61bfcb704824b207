"""List, inspect, compare and clean run folders."""
