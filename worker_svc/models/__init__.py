"""Model architectures, one file per family, and the choice among their implementations."""
