"""Launch: parses a command line into a request, composes a plan from it, and executes the plan."""
