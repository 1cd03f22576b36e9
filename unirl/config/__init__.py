"""Recipes: composing them, checking them against the classes that they name, and building objects from them."""
