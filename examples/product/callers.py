"""Callers that ask, read the drafts and rate each of them, until Ctrl-C."""

import threading
import time

import httpx

from desk import ASKED, stars


def call(thing: str) -> None:
    question = f"What is {thing}?"
    with httpx.Client(base_url="http://127.0.0.1:9000", timeout=700) as service:
        while True:
            asked = service.post("/ask", json={"question": question})
            drafts = asked.json()["drafts"] if asked.status_code == 200 else []
            for draft in drafts:
                if draft["id"] is not None:
                    service.post("/rate", json={"id": draft["id"], "stars": stars(question, draft["text"])})
            for draft in drafts[:1]:
                print(stars(question, draft["text"]), "stars:", " ".join(draft["text"].split())[:90])
            time.sleep(1)


for thing in ASKED:
    threading.Thread(target=call, args=(thing,), daemon=True).start()
threading.Event().wait()
