"""The command line interface: arguments in, exit code out."""
