"""Optional features of a request, one file each, as callbacks of the decode loops (`Feature`)."""
