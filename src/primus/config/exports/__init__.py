"""Write experiments as files of other frameworks, one module for each kind of file."""
