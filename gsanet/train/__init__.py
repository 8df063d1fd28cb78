"""Training: recipes, the engine, checkpoints and evaluation."""
