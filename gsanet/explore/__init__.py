"""The explorer: a page in the browser that shows where a pixel takes from. `gsanet explore` serves it."""
