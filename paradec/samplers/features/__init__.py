"""Optional features of a request, a file each, which the loops of the families call (`Feature`)."""
