"""The functions that users call, and their results."""
