"""Draw docs/images/chat_page.png: the page of chat.py --web in a talk with a tiny model that was taught these answers.

python -m tests.dev.draw_chat_page
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from tests.chat_page import ROOT, WAIT, Tab, expect, open_browser, serve_chat
from tests.llm.talkers import write_chat_model, write_story_model

TARGET = ROOT / "docs/images/chat_page.png"
TAUGHT = (
    (
        "What is grouped-query attention?",
        "Several heads of queries share one head of **keys and values**. Llama 3 has 32 of the first, 8 of the second: "
        "its cache is a quarter of what it would be.",
    ),
    (
        "How is it called in PyTorch?",
        "```python\nmixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)\n```\nNo key is copied.",
    ),
)


def main() -> None:
    """Teach, serve, ask, draw."""
    with tempfile.TemporaryDirectory() as folder:
        write_chat_model(Path(folder) / "llama-tiny-chat", context=8192, pairs=TAUGHT, steps=200)
        write_story_model(Path(folder) / "llama-tiny-stories")
        settings = ["--temperature", "0.7", "--top_p", "0.9", "--max_new_tokens", "512"]
        with serve_chat("--models_dir", folder, *settings) as address, open_browser() as browser:
            tab = Tab(browser, address, width=1200, height=860)
            tab.page.click("#markdown input")
            for i, (question, _) in enumerate(TAUGHT):
                tab.send(question)
                expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(i + 1, timeout=WAIT)
                tab.wait_idle()
            tab.page.wait_for_timeout(1000)  # transitions
            tab.page.screenshot(path=TARGET)
            tab.page.close()
    Image.open(TARGET).convert("RGB").quantize(128).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
