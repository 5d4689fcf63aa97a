"""Training of what some methods bring along; today the filters of Learn2PD."""
