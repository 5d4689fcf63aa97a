"""Language models: one file for each checkpoint family, on transformers' classes."""
