"""Read the configuration files of other frameworks as settings of primus, one module for each kind of file."""
