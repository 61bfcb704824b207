"""Between the nodes of one run: rendezvous, control channel, collected reports, exit barrier."""
