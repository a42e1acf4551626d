"""BabyAI: grid worlds in words."""
