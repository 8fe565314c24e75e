"""Fine-tuning of base models with the frameworks' own trainers, with or without the pOKS loss."""
