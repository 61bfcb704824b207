"""Container images of primus: templates by platform, their build, and the images that exist."""
