"""Functions that several stages share: sources, texts, adapters, files of the model, and opening a run."""
