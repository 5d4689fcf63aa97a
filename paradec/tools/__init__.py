"""What is built on decoding: comparing, tuning, training, estimating, checking, looking at traces."""
