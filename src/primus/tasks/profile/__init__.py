"""Profile runs that train already."""
