"""The policy: model, adapters and tokenizer."""
