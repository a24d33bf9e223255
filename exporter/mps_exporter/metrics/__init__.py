"""What is exported: the catalogue, and the way from a snapshot to bytes."""
