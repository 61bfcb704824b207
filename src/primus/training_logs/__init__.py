"""Logs of training frameworks: which one wrote a log, and the values of each step."""
