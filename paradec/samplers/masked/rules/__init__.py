"""Rules that select undecided positions to make final, one file per method."""
