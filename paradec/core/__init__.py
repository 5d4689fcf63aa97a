"""What all families share: the protocol and its values, random numbers, checks, registries. Nothing of it knows a
model."""
