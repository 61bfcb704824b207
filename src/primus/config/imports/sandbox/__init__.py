"""Expand a bash script with bash itself, where it changes nothing and reaches nothing."""
