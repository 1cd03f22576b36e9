"""A model of its own for sampling, which runs wherever the trained one does."""
