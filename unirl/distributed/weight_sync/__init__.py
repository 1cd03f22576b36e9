"""How trained weights reach an engine, and the proof that they did."""
