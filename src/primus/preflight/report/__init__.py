"""The report of a preflight as text, Markdown, HTML and JSON."""
