"""A check of all idle nodes of a cluster: its folder, what has changed since the last one, and its page."""
