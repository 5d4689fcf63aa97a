"""Protocol, values, random numbers, checks and registries of all families; independent of models."""
