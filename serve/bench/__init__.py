"""Measures what answers take: time by time, models in turn, memory and energy."""
