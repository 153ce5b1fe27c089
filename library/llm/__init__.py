"""Text and chats as tokens, batches of them, generation and evaluation of language models."""
