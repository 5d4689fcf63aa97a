"""A file a method: which undecided positions become final."""
