"""Read the files of a checkpoint, before any model is built: config.json, weights, tokenizer, adapters."""
