"""Image models that decide a group of positions per forward, in any order (`groups`) or by diagonals (`nar`)."""
