"""From text to Llama 3.2 in nine steps, in plain PyTorch: ``step1_tokens`` to ``step9_speed`` (docs/course.md).

Each step is a script (``python walkthrough/step2_gpt2.py``) in cells (``# %%``) that VS Code, PyCharm, Spyder and
jupytext run one by one. It imports the steps before it, saves pictures in ``output/walkthrough``, and ends with a check
against transformers or a formula; ``tests/walkthrough`` checks more. Tandem's own decoder does the same faster
(``library.models.llm.model``).
"""
