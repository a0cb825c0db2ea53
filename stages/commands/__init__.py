"""Commands that join stages, or read what stages wrote; and what they refuse before the first one writes."""
