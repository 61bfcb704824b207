"""Runtimes: where a task runs; each file is a plug-in."""
