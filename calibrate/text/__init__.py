"""Words to windows: texts of any form, chats and mixtures of them, as windows of tokens.

Knows of a model only its tokenizer.
"""
