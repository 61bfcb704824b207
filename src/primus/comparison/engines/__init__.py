"""Engines that train one experiment, compared step by step."""
