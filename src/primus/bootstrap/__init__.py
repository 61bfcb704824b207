"""What `./primus-cli` needs before the packages of primus are installed: the standard library only."""
