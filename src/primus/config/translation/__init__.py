"""Settings of other frameworks in experiment files: which there are, and what they mean here."""
