"""Tools on top of decoding: evaluation, tuning, training, drawings of traces."""
