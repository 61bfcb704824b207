"""From text to token files, and the steps before and after."""
