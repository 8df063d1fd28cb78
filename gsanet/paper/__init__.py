"""The paper's printed figures as data, and how each is measured again."""
