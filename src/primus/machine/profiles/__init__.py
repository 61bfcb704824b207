"""Device models; each file is a plug-in with PROFILES, the first one being what its name means."""
