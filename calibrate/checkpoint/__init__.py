"""The files of a checkpoint, before any model is made of them: config.json, weights, tokenizer, adapters."""
