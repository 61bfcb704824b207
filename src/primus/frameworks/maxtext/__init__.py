"""MaxText: its model, optimizer and training step, with the data, schedule, reports and checkpoints of primus."""

ENGINES = ("maxtext",)
