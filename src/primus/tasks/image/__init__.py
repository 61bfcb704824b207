"""Build, list, show and clean container images of primus."""
