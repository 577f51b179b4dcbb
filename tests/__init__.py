"""The tests, one package: helpers are imported as ``tests.<name>``."""
