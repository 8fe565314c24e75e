"""Studies of the paper: ablations, fine-tuning, residual analysis and image corruptions."""
