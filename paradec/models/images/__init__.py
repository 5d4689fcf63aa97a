"""Models of pictures: autoregressive, masked and continuous ones, and the decoders from codes to pixels."""
