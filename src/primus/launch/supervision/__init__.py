"""One node's attempts at a run: heartbeats, hang and straggler detection, restarts."""
