"""The part of `./primus-cli` that runs before its packages are installed; it uses the standard library only."""
