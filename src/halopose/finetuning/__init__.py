"""Fine-tuning of base models with the trainers of their frameworks, with or without the pOKS loss."""
