"""Training: `replay` gives trainers the log-probabilities of rollouts; `learn2pd` trains the filters of Learn2PD."""
