"""From words to processes: the request, the plan that it becomes, and the one place that acts on it."""
