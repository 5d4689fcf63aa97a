"""The functions that users call, and what they return."""
