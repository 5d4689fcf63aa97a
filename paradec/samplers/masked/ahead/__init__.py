"""Methods that run the steps of another sampler from several drafts of a row in one call."""
