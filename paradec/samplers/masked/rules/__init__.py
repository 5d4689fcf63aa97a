"""Rules that select the undecided positions that become final, one file per method."""
