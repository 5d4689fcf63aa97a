"""Students of autoregressive image models, which make a picture from noise in one call or few."""
