"""Samplers for continuous models: at some solver steps the output is forecast from earlier evaluations."""
