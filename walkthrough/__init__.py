"""From GPT-2 to Llama 3.2 in plain PyTorch, one change at a time: ``gpt2``, ``llama2``, ``llama3``, ``llama32``.

Each module is a script too (``python walkthrough/llama2.py``), in cells (``# %%``) that VS Code, PyCharm, Spyder and
jupytext run one by one. A step is a :class:`walkthrough.gpt2.Parts` that differs from the one before in one field. The
published models are compared with transformers' on the same weights, and with Tandem's own decoder, which does the same
faster (``library.models.llm.model``); ``tests/walkthrough`` does so for every step, with gradients.
"""
