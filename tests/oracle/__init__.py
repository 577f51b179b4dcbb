"""The recurrences as the papers write them, token by token, fp64, numpy alone: nothing of the package is imported."""
