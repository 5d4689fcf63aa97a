"""Continuous models: at some solver steps the output is forecast from earlier evaluations instead of evaluated."""
