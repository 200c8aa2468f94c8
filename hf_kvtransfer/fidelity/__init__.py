"""Is a translation good enough, on whose text, and who says so."""
