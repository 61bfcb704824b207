"""Datasets by name: from the Hugging Face hub, from plug-ins, prepared on first use."""
