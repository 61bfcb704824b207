"""Environment variables of backends by parallel layout; each file is a plug-in with LIBRARIES and settings."""
