"""What is built on decoding: comparing, tuning, training, looking at traces."""
