"""Quire beside its peers: the same seeded requests on one machine, one engine at a time."""
