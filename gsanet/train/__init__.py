"""Training: recipes, engine, checkpoints and evaluation (Section 4 of the paper, and Appendix A)."""
