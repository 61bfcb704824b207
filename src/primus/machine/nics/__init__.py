"""Kinds of network adapters; each file is a plug-in with NIC."""
