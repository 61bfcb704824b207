"""Matrix products: how a step's are found, their files, and their tuners."""
