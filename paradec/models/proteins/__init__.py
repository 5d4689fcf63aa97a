"""Models of protein sequences for given backbones: structures, ProteinMPNN's network, and the model around it."""
