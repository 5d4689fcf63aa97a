"""Optional features of a request as callbacks of the decode loops (`Feature`), one file each."""
