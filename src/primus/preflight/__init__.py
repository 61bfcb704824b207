"""Is this node, are these nodes, fit for a long job?"""
