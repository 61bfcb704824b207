"""Tasks: what is run; each file is a plug-in, a folder is the first word of its tasks' names."""
