"""The learning rate of each optimizer step, as a function of the step alone: a resumed run needs no state for it."""

import math

from gsanet.train.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of a step, counted from 0.

    The warm-up rises linearly and reaches the peak with its last step; a cosine then falls from the peak to zero,
    which it would reach one step after the last.
    """
    peak = recipe.peak_lr
    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return peak * (step + 1) / warmup
    if recipe.step_size is not None:
        return peak * recipe.step_factor ** (step // recipe.step_size)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))
