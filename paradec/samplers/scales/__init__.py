"""Samplers that commit a whole scale of a picture at a step: a base and one file per method."""
