"""Training: `replay` computes log-probabilities of rollouts for trainers; `learn2pd` trains Learn2PD's filters."""
