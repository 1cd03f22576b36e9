"""The data plane: where heavy rows stay, and how they travel."""
