"""The command line: words in, exit code out."""
