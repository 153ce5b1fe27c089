"""Draw docs/images/chat_page.png: the page's chat in a talk with a tiny model that was taught these answers.

python -m tests.dev.draw_chat_page
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from PIL import Image

from tests.llm.talkers import write_chat_model, write_story_model
from tests.web.page import ROOT, Tab, expect, open_browser, serve

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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chat_model(folder / "models/llama-tiny-chat", context=8192, pairs=TAUGHT, steps=200)
        write_story_model(folder / "models/llama-tiny-stories")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with serve(folder) as server, open_browser() as browser:
            tab = Tab(browser, server)
            tab.open("/chat")
            tab.page.click("#load")
            expect(tab.page.locator("#send")).to_be_enabled(timeout=60_000)
            tab.page.check("[name=markdown]")
            for question, _ in TAUGHT:
                tab.page.fill("#text", question)
                tab.page.press("#text", "Enter")
                expect(tab.page.locator("#status")).to_contain_text("tokens in", timeout=60_000)
                expect(tab.page.locator("#stop")).to_be_disabled()
            tab.page.screenshot(path=TARGET)
            tab.close()
    Image.open(TARGET).convert("RGB").quantize(128).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
