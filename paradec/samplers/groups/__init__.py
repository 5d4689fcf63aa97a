"""Image models that decide a group of cells per forward, in a given order."""
