"""A finding, what it is judged by (thresholds, expectations of a site), and the node that is judged."""
