"""What runs a step: an engine, or the torch modules; one interface."""
