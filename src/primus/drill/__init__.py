"""The failure drill: the user's own training with a planted fault in each run, next to an undisturbed one."""
