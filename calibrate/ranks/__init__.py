"""Several processes that measure together: which one this is, who still lives, and how their counts are added."""
