"""Serve the loop over HTTP, as OpenAI's API has it: `fp8q serve`. Needs the extra `serve`."""
