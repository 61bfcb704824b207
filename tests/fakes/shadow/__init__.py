"""A package of another project with the name of ours."""

raise SystemExit("primus of the working folder was imported")
