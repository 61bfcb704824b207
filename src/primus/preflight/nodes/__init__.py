"""What the nodes of one preflight do together: steps, collected reports, comparison."""
