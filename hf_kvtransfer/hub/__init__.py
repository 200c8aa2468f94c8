"""Mappers on the Hugging Face Hub: their files, their cards, and how they are found."""
