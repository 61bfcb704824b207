"""Requests over HTTP: when a request is sent again, a session for our own requests, and the Hugging Face Hub."""
