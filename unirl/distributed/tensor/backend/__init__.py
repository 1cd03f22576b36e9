"""Services outside the workers that carry rows between them."""
