"""The only room that touches the world: one file a source."""
