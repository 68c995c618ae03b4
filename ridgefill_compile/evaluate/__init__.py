"""How far a filled answer is from the exact one, and how much sooner it comes."""
