"""From texts of any form, chats and mixtures of them to windows of tokens.

Of a model only the tokenizer is used.
"""
