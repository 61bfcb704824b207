"""Compare engines that train the same experiment."""
