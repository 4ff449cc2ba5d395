"""What scheduler and workers both speak: ids, value types, errors, the wire."""
