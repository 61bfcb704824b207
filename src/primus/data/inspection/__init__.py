"""What token files hold, and what a step of training consists of."""
