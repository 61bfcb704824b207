"""A checkpoint that a task is given, with the tokenizer and the other files that belong to it."""
