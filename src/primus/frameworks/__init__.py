"""Who trains: a folder for each framework, with its driver in `engine` and what primus knows of its files and logs."""
